"""The child process that reads pickles; it imports nothing of Heedful, so that Python can start it isolated (-I).

    python -I unpickle_child.py '{"files": [[input, output], ...], "max_bytes": ..., "seconds": ...}'

It prints one line of JSON: {"network": ..., "tensors": ...}, and "error" and "file" if it failed. "network" is the
reason why the process could not be cut off from the network, or "" if it was.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import sys

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def cut_off_network() -> str:
    """Move into an empty network namespace; returns why the system does not allow it, or an empty string."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0:
            return ""
        return os.strerror(ctypes.get_errno())
    except (AttributeError, OSError):
        return "this system has no network namespaces"


def limit(max_bytes: int, seconds: int) -> None:
    """Limit this process.

    Args:
        max_bytes: Size of the weights. Memory is limited to its present use and four times this size, and each file to
            twice this size.
        seconds: Maximum CPU time.
    """
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        used = 1 << 33
    for resource_type, value in (
        (resource.RLIMIT_AS, used + 4 * max_bytes + (1 << 28)),
        (resource.RLIMIT_FSIZE, 2 * max_bytes + (1 << 20)),  # tied tensors are written twice
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(resource_type)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(resource_type, (value, value))


def convert(source: str, target: str, max_bytes: int) -> int:
    """Read one pickled file and write it as safetensors; returns how many tensors it has."""
    import torch
    from safetensors.torch import save_file

    values: object = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(values, dict):
        raise NotWeightsError(f"it holds a {type(values).__name__}; expected names and tensors")
    tensors = {}
    size = 0
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise NotWeightsError(
                f"under {name!r} it holds a {type(value).__name__}; expected names and tensors, and nothing else "
                "(of a training checkpoint, save only the state_dict)"
            )
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise NotWeightsError(f"{name!r} is not a plain tensor: {value.layout}, {value.device}")
        size += value.nbytes
        if size > 2 * max_bytes + (1 << 19):
            raise NotWeightsError(f"its tensors are more than {size} bytes, but the file has far fewer")
        tensors[name] = value.detach()
    # clones, since safetensors saves no tensors that share memory
    clones = {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    save_file(clones, target, metadata={"format": "pt"})
    return len(clones)


class NotWeightsError(Exception):
    """The file is complete, but holds something else than a plain table of tensors."""


def explain_refusal(error: BaseException) -> str:
    """Explain an error of `convert`, without PyTorch's advice to switch its protection off."""
    text = str(error)
    kind = type(error).__name__
    global_name = re.search(r"\b(?:GLOBAL|[Uu]nsupported class) `?([\w.]+)", text)
    if isinstance(error, NotWeightsError | OSError):
        return text
    if global_name and kind == "UnpicklingError":
        return (
            f"it asks for {global_name[1]}, which weights do not need: it may be malicious, and nothing of it was run"
        )
    if "tar" in text and "weights_only" in text:
        return "it is in the tar format of before 2018, which cannot be read safely: save it again with a newer torch"
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return "reading it takes far more memory than its size"
    reason = (text.partition("WeightsUnpickler error:")[2] or text).strip().partition("\n")[0].partition(" Please ")[0]
    return f"it is damaged, or torch.save did not write it ({kind}: {reason[:200]})"


def main() -> None:
    """Convert the files that the command line lists, and print the result."""
    job = json.loads(sys.argv[1])
    count, answer = 0, {"network": cut_off_network()}  # impossible after torch has started threads
    try:
        import safetensors.torch  # noqa: F401
        import torch

        torch.set_num_threads(1)
        limit(job["max_bytes"], job["seconds"])
        for source, target in job["files"]:
            answer["file"] = os.path.basename(source)
            count += convert(source, target, job["max_bytes"])
    except BaseException as error:
        answer["error"] = explain_refusal(error) if "file" in answer else f"torch cannot be used in the child: {error}"
    sys.stdout.write(json.dumps(answer | {"tensors": count}) + "\n")


if __name__ == "__main__":
    main()
