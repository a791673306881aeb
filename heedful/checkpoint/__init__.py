"""Model folders in Hugging Face's format: loading and saving of models, and new heads for them."""

from heedful.checkpoint.bundle import ModelBundle, assign, create
from heedful.checkpoint.config import BundleConfig, read_config, write_config
from heedful.checkpoint.loading import RUN_MODEL, config_of, folder_of, load, weight_files
from heedful.checkpoint.saving import save

__all__ = [
    "RUN_MODEL",
    "BundleConfig",
    "ModelBundle",
    "assign",
    "config_of",
    "create",
    "folder_of",
    "load",
    "read_config",
    "save",
    "weight_files",
    "write_config",
]
