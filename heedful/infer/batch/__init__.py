"""Batch prediction: every row of files is answered, into files."""

from heedful.infer.batch.file_prediction import BatchSettings as BatchSettings
from heedful.infer.batch.file_prediction import Progress as Progress
from heedful.infer.batch.file_prediction import Summary as Summary
from heedful.infer.batch.file_prediction import predict_files as predict_files
