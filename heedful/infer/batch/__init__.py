"""Batch prediction: every row of files is answered, into files."""

from heedful.infer.batch.file_prediction import BatchProgress as BatchProgress
from heedful.infer.batch.file_prediction import BatchSettings as BatchSettings
from heedful.infer.batch.file_prediction import BatchSummary as BatchSummary
from heedful.infer.batch.file_prediction import predict_files as predict_files
