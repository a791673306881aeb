"""Batch prediction: files in, files with an answer for every row out."""

from heedful.infer.batch.file_prediction import BatchProgress as BatchProgress
from heedful.infer.batch.file_prediction import BatchSettings as BatchSettings
from heedful.infer.batch.file_prediction import BatchSummary as BatchSummary
from heedful.infer.batch.file_prediction import predict_files as predict_files
