"""DeepSpeed's ZeRO on one page: transformers.Trainer with a DeepSpeed file of your own.

    bash run_scripts/setup.sh --deepspeed
    torchrun --standalone --nproc_per_node=2 -m app.deepspeed_run --deepspeed ds_config.json

The usual files of tutorials run as they are: ZeRO-1, -2 and -3, offload, fp16, with "auto" for what the flags decide.
Rows, split, batches, initial weights, dropout masks and evaluation are those of app.ddp_loop. DeepSpeed adds gradients
in an order of its own, so the results are equal within rounding: `python -m app.compare` shows it. For bitwise
identical results, and runs that can be resumed, use `--strategy zero1`, `zero2` or `zero3` of app.ddp_loop.
"""

from __future__ import annotations

from .cli import OneLineParser
from .program import Program
from .setting_groups import CheckpointSettings, EvaluationSettings
from .settings import TYPES

# DeepSpeed's file decides on sharding, and this page has no checkpoints and no evaluations during training.
LEFT_OUT = {
    *("strategy", "cpu_offload", "ddp_comm_hook", "param_dtype", "reduce_dtype", "profile", "dry_run"),
    "trace_tensors",  # DeepSpeed keeps the tensors in forms of its own
    *CheckpointSettings.__annotations__,
    *(EvaluationSettings.__annotations__.keys() - {"eval_batch_size"}),
}


def add_arguments(parser: OneLineParser) -> None:
    parser.add_argument("--deepspeed", metavar="FILE.json", required=True, help="DeepSpeed's configuration")


PROGRAM = Program(__doc__, add_arguments, only=[name for name in TYPES if name not in LEFT_OUT])
if __name__ == "__main__":
    PROGRAM.check_command_line()  # before torch is imported

import json
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer

from .common.errors import RunError, UserError
from .ddp_loop import evaluate
from .distributed.process_group import join
from .model.dropout import RowDropout
from .model.inputs import to_device
from .record.run_record import RunRecord
from .settings import OF_AN_UPDATE, Settings
from .trainer.arguments import training_arguments
from .training.prepare import Preparation, prepare


def main(settings: Settings, deepspeed: str) -> None:
    try:
        import deepspeed as engine
    except ImportError:
        raise UserError("DeepSpeed is not installed: run bash run_scripts/setup.sh --deepspeed") from None
    try:
        config = json.loads(Path(deepspeed).read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise UserError(f"--deepspeed {deepspeed}: {problem}") from None
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+. is deprecated", FutureWarning)  # DeepSpeed's calls
    engine.ops.__compatible_ops__ = {}  # otherwise it compiles an all-reduce for CPUs, which takes half a minute
    with join(settings) as world:
        run = prepare("deepspeed_run", replace(settings, save_strategy="no", eval_strategy="no"), world)
        record = RunRecord(run)
        with record.locate_failures():
            try:
                DeepSpeedTrainer(run, record, config).train()
            except (ImportError, OSError, ValueError, AssertionError) as problem:
                # What the file asks for contradicts the flags, or needs what this machine lacks, such as a compiler.
                raise RunError(f"DeepSpeed: {' '.join(str(problem).split())}") from problem
            scores, logits = evaluate(run.model, run.test_set, run.settings, world=world)
            with engine.zero.GatheredParameters(list(run.model.parameters())):  # ZeRO-3 shards them
                record.finish(logits, scores)


class DeepSpeedTrainer(Trainer):
    """Trainer with the batches, dropout masks and log of app.ddp_loop. All else is Trainer's and DeepSpeed's."""

    def __init__(self, run: Preparation, record: RunRecord, config: Any) -> None:
        # Trainer has the same names, and puts the values where the file says "auto".
        arguments = training_arguments(
            run,
            deepspeed=config,
            fp16=run.settings.precision == "fp16",
            bf16=run.settings.precision == "bf16",
            **{name: getattr(run.settings, name) for name in OF_AN_UPDATE - {"max_grad_norm"}},
        )
        super().__init__(model=run.model, args=arguments, train_dataset=run.data.train_rows)
        # Otherwise Trainer would multiply the loss of a classifier, as app/trainer_run.py explains.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.run, self.record = run, record
        self.losses: list[torch.Tensor] = []  # of the micro-batches of this step
        self.batches: list[dict[str, torch.Tensor]] = []

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the shared loader: accelerate would assign complete batches to ranks instead of single rows."""
        return self.run.data.train_loader(self.run.strategy.logical_ranks, self.run.settings, self.run.world)

    def training_step(self, model: Any, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train on a micro-batch, and record the step after its last one, in which DeepSpeed updates the weights."""
        record, step = self.record, self.state.global_step
        if step == 0 and not self.batches:
            never = SimpleNamespace(requested=lambda: False)  # without checkpoints, a signal ends the run
            record.begin(state=None, wrapped=model, stop=never)  # type: ignore[arg-type]
        self.batches.append(inputs)
        learning_rate = self._get_learning_rate()
        loss = super().training_step(model, to_device(inputs, self.run.model, self.run.world), *args, **kwargs)
        if len(self.batches) == self.args.gradient_accumulation_steps:
            norm = torch.as_tensor(model.get_global_grad_norm(), dtype=torch.float32)
            losses = torch.stack(self.losses)
            record.after_step(step + 1, losses, norm, learning_rate=learning_rate, batches=self.batches)
            self.losses, self.batches = [], []
        return loss

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the shared loss, with dropout masks that belong to the rows."""
        plan, step = self.run.plan, self.state.global_step
        index, micro_batch = divmod(len(self.losses), plan.accumulation_steps)
        rows = plan.rows_of(self.run.strategy.logical_ranks[index], micro_batch)
        with RowDropout(self.run.settings.seed, step, rows):
            loss = self.run.loss(model(**inputs), inputs["labels"], step)
        self.losses.append(loss.detach().float())
        return loss


if __name__ == "__main__":
    PROGRAM.launch(main)
