"""Everything that the next step depends on, in files without code: safetensors and JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from transformers import set_seed

from app.distributed.collectives import all_gather_object, wait_for_device
from app.distributed.world import World
from app.errors import RunError
from app.runs.resume import Resume
from app.runs.schema import MODEL, OPTIMIZER, RANDOM, SCHEDULE

Tensors = dict[str, torch.Tensor]


def write_training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, world: World, folder: Path
) -> None:
    """Writes weights, optimizer, schedule and the random streams of all ranks. Collective; rank 0 writes."""
    streams = all_gather_object({name: stream.numpy() for name, stream in random_streams(world).items()}, world)
    if not world.is_main_process:
        return
    write_weights(folder, model.state_dict())
    state = optimizer.state_dict()
    moments = {f"{i}.{name}": value for i, values in state["state"].items() for name, value in values.items()}
    save_file(_unshared(moments), folder / OPTIMIZER)
    every_rank = {f"{r}.{name}": torch.from_numpy(x) for r, rank in enumerate(streams) for name, x in rank.items()}
    save_file(every_rank, folder / RANDOM)
    schedule = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}  # code, no state
    content = {"param_groups": state["param_groups"], "schedule": schedule}
    (folder / SCHEDULE).write_text(json.dumps(content), encoding="utf-8")


def read_training_state(
    resume: Resume, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler, world: World
) -> None:
    """Restore everything on every rank.

    Where the saved random streams do not apply (`Resume.changes`), every rank starts a new one.
    """
    folder = resume.checkpoint
    assert folder is not None
    read_weights(folder, model)
    content = json.loads((folder / SCHEDULE).read_text(encoding="utf-8"))
    moments: dict[int, Tensors] = {}
    for key, value in load_file(folder / OPTIMIZER).items():
        index, _, name = key.partition(".")
        moments.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": moments, "param_groups": content["param_groups"]})
    optimizer.zero_grad()
    scheduler.load_state_dict(content["schedule"] | {"lr_lambdas": scheduler.state_dict().get("lr_lambdas")})
    if not resume.changes:
        mine = f"{world.rank}."
        streams = load_file(folder / RANDOM)
        restore_streams({n.removeprefix(mine): x for n, x in streams.items() if n.startswith(mine)}, world)
    else:
        set_seed(resume.new_seed + world.rank)


def build_buckets(ddp: torch.nn.Module, batch: Tensors, world: World) -> None:
    """Let DDP settle its gradient buckets, as it does in the first step of a run, without training.

    With three ranks or more, the order in which a gradient's parts are added depends on its place in a bucket, so a
    resumed run whose first step used unsettled buckets would differ from an undisturbed one in the last bit.

    Call this before `read_training_state`: the forward pass draws random numbers and updates buffers such as the
    running statistics of BatchNorm.
    """
    ddp.train()
    ddp(**batch).loss.backward()
    if isinstance(ddp, DistributedDataParallel) and not ddp.find_unused_parameters:
        require_gradients(ddp)
    ddp.zero_grad()
    wait_for_device(world)


def require_gradients(model: torch.nn.Module) -> None:
    """Check that backward() has reached every parameter, which DDP relies on unless it is set to search for the rest.

    DDP itself complains only in the next forward pass, when the first step has been made with gradients that were not
    averaged over the ranks. The model is the same on every rank, and so is the outcome.

    Raises:
        RunError: some parameters have no gradient.
    """
    unused = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    if unused:
        raise RunError(
            f"{len(unused)} of the model's parameters, such as {unused[0].removeprefix('module.')}, take no part in "
            "classification: add --ddp_find_unused_parameters"
        )


def write_weights(folder: Path, state: Tensors) -> None:
    """Write a model's complete state dict as model.safetensors."""
    save_file(_unshared(state), folder / MODEL)


def read_weights(folder: Path, model: torch.nn.Module) -> None:
    """Puts the weights of `write_weights` into the model, wherever it is."""
    model.load_state_dict(load_file(folder / MODEL))


def random_streams(world: World) -> Tensors:
    """The state of every random stream of this process: torch's on CPU and GPU, numpy's and Python's."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, python_gauss = random.getstate()
    streams = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_rest": torch.tensor([position, has_gauss, gauss], dtype=torch.float64),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_rest": torch.tensor([] if python_gauss is None else [python_gauss], dtype=torch.float64),
    }
    if world.device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(world.device)
    return streams


def restore_streams(streams: Tensors, world: World) -> None:
    """Lets every random stream go on from where `random_streams` found it."""
    torch.set_rng_state(streams["torch"])
    position, has_gauss, gauss = streams["numpy_rest"].tolist()
    keys = streams["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, *words = streams["python"].tolist()
    rest = streams["python_rest"].tolist()
    random.setstate((version, tuple(words), rest[0] if rest else None))
    if world.device.type == "cuda":
        torch.cuda.set_rng_state(streams["cuda"], world.device)


def _unshared(tensors: dict[str, Any]) -> Tensors:
    """Contiguous CPU copies: safetensors refuses tensors that share memory, such as tied weights."""
    seen: set[int] = set()
    copies = {}
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        copies[name] = copy.clone() if copy.data_ptr() in seen else copy
        seen.add(copy.data_ptr())
    return copies
