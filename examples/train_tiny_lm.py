"""Train a small byte-level language model with manifold-constrained hyper-connections, MoE layers and Engram.

    uv run examples/train_tiny_lm.py                # tiny: minutes on a CPU, where plain PyTorch computes everything
    uv run examples/train_tiny_lm.py --size small   # for a GPU
    uv run examples/train_tiny_lm.py --size small --backend reference --compare runs/small-kernels
    uv run torchrun --nproc-per-node 2 examples/train_tiny_lm.py --expert-parallel

It learns the sources of Python's standard library, a part of which is held out for validation. `--backend kernels`
takes the layers from tk_modeling, `--backend fp8` too, with the experts' products in FP8, `--backend reference` from
its plain PyTorch references; initial weights, batches, attention and optimizer are the same. Loss and time of each step
(log.jsonl), a plot (loss.png) and a checkpoint are written to `--out`. `--resume` continues from the checkpoint with
the same bits as an uninterrupted run; on a GPU this needs `--deterministic`. With more `--steps` it trains a finished
run further. Ctrl-C ends a run after the step at hand, with a checkpoint.

With `--expert-parallel` the processes that torchrun has started train one model, as one process would: each has a part
of every batch and of every layer's experts, and all else is the same everywhere. The first one reports; each of the
others has a folder in `--out`. Ctrl-C ends such a run at once, and `--resume` goes on from its last checkpoint.
"""

import json
import math
import os
import pickle
import platform
import signal
import statistics
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import tk_ep
import tk_modeling
import tk_modeling.reference
from tk_engram.layout import engram_layout

VOCABULARY = 256  # bytes
DTYPE = torch.bfloat16  # of activations and of weights in matrix products; the optimizer keeps float32 copies
READ_EVERY = 10  # Steps between reads of losses and times; for each read the host waits for the GPU.
WARM_UP_STEPS = 50  # Steps left out of the median time of a step.
AVERAGED = 20  # Steps over which plot and table average the loss.

Entry = dict[str, Any]  # A line of the log: one step.


@dataclass(frozen=True)
class Size:
    """Sizes of the model and its training."""

    hidden: int
    layers: int
    heads: int
    streams: int
    experts: int
    topk: int
    intermediate: int
    engram_layers: tuple[int, ...]
    engram_rows: int  # of each table, at least
    batch: int
    length: int
    steps: int
    learning_rate: float


# fmt: off
SIZES = {
    "tiny": Size(
        hidden=64, layers=3, heads=2, streams=4, experts=4, topk=2, intermediate=64,
        engram_layers=(1, 2), engram_rows=2048,
        batch=16, length=128, steps=200, learning_rate=4e-3,
    ),
    "small": Size(
        hidden=512, layers=8, heads=8, streams=4, experts=16, topk=4, intermediate=256,
        engram_layers=(1, 4), engram_rows=32768,
        batch=64, length=512, steps=300, learning_rate=1e-3,
    ),
}
# fmt: on


class Ranks(NamedTuple):
    """The processes that train the model, of which this is one: without a buffer, this one alone."""

    index: int = 0
    number: int = 1
    buffer: tk_ep.ElasticBuffer | None = None

    def share(self, x: Tensor) -> Tensor:
        """This process's part of a batch, or of all experts."""
        return x.chunk(self.number)[self.index]

    def sum(self, x: Tensor) -> Tensor:
        """Add up a tensor of all processes, in place."""
        if self.buffer is not None:
            dist.all_reduce(x, group=self.buffer.group)
        return x


ALONE = Ranks()


@dataclass(frozen=True)
class Run:
    """What to train, and how."""

    size: Size
    backend: str
    steps: int | None  # None: those of the checkpoint, or without one of the size
    seed: int
    out: Path
    device: torch.device
    compile: bool
    deterministic: bool
    save_every: int
    ranks: Ranks = ALONE


# Data


def library_files(root: Path) -> Iterator[str]:
    """Sources and license of the standard library, without tests and files that depend on the machine."""
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            if name == "LICENSE.txt" or (name.endswith(".py") and not name.startswith("_sysconfigdata")):
                yield Path(folder, name).relative_to(root).as_posix()


def read_text(device: torch.device) -> tuple[Tensor, Tensor, str]:
    """Bytes to train on, bytes held out (both uint8), and their description: files by name, separated by zero bytes.

    About one file in twenty, by a hash of its name, is held out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: tuple[list[bytes], list[bytes]] = [], []
    for name in sorted(library_files(root)):
        files[zlib.crc32(name.encode()) % 20 == 0].append((root / name).read_bytes())
    train, held_out = (b"\0".join(part) for part in files)
    description = (
        f"Python {platform.python_version()}'s library: {len(files[0])} files ({len(train) / 1e6:.1f} MB) to train on, "
        f"{len(files[1])} ({len(held_out) / 1e6:.1f} MB) held out; CRC {zlib.crc32(train + held_out):08x}"
    )
    texts = (torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device) for text in (train, held_out))
    return *texts, description


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """`length` bytes from each start on, int32, and for each of them the next byte, int64."""
    found = text[starts.to(text.device, non_blocking=True)[:, None] + torch.arange(length + 1, device=text.device)]
    return found[:, :-1].int(), found[:, 1:].long()


# Model


class Attention(nn.Module):
    """Norm and causal self-attention."""

    def __init__(self, size: Size, layers: ModuleType) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm = layers.RMSNorm(size.hidden, dtype=DTYPE)
        self.qkv = nn.Linear(size.hidden, 3 * size.hidden, bias=False, dtype=DTYPE)
        self.out = nn.Linear(size.hidden, size.hidden, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) to the same shape."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Norm and mixture of experts."""

    def __init__(self, size: Size, layers: ModuleType, options: dict[str, Any]) -> None:
        super().__init__()
        self.norm = layers.RMSNorm(size.hidden, dtype=DTYPE)
        self.moe = layers.MoE(size.hidden, size.intermediate, size.experts, size.topk, dtype=DTYPE, **options)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the auxiliary loss, which HyperConnection passes on."""
        return self.moe(self.norm(x))


class LanguageModel(nn.Module):
    """Bytes to logits of the next byte. `layers` is tk_modeling, with options of its MoE, or its reference."""

    def __init__(self, size: Size, layers: ModuleType, **moe: Any) -> None:
        super().__init__()
        self.expand, self.streams = layers.expand_from_embedding, size.streams
        self.embedding = nn.Embedding(VOCABULARY, size.hidden, dtype=DTYPE)
        # Learned positions: rotating q and k in plain PyTorch would take longer than the attention.
        self.position = nn.Embedding(size.length, size.hidden, dtype=DTYPE)
        # Two tables each for n-grams of 2, 3 and 4 bytes.
        layout = engram_layout(VOCABULARY, size.engram_layers, max_ngram=4, num_heads=2, table_sizes=size.engram_rows)
        options = {"head_dim": 32, "mhc_mult": size.streams, "dtype": DTYPE}
        self.engrams = nn.ModuleDict(
            {str(layer): layers.Engram(size.hidden, layout, i, **options) for i, layer in enumerate(layout.layer_ids)}
        )

        def connected(sublayer: nn.Module) -> nn.Module:
            return layers.HyperConnection(sublayer, size.hidden, mhc_mult=size.streams)

        self.attentions = nn.ModuleList(connected(Attention(size, layers)) for _ in range(size.layers))
        self.feed_forwards = nn.ModuleList(connected(FeedForward(size, layers, moe)) for _ in range(size.layers))
        self.head = layers.HyperHead(size.hidden, mhc_mult=size.streams)
        self.norm = layers.RMSNorm(size.hidden, dtype=DTYPE)
        self.logits = nn.Linear(size.hidden, VOCABULARY, bias=False, dtype=DTYPE)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """int32 (batch, sequence) to float32 logits (batch, sequence, 256) and the sum of the auxiliary losses."""
        x = self.expand(self.embedding(tokens) + self.position.weight[: tokens.shape[1]], self.streams)
        auxiliary = torch.zeros((), device=x.device)
        for layer, (attention, feed_forward) in enumerate(zip(self.attentions, self.feed_forwards)):
            if str(layer) in self.engrams:
                x = self.engrams[str(layer)](x, tokens)
            x, aux = feed_forward(attention(x))
            auxiliary = auxiliary + aux
        return self.logits(self.norm(self.head(x))).float(), auxiliary

    def loss(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats per byte, and the sum of the auxiliary losses."""
        logits, auxiliary = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), auxiliary


def is_expert(name: str) -> bool:
    """Whether a parameter has weights of experts, of which each process has its own."""
    return name.endswith(("moe.gate_up", "moe.down"))


def make_model(size: Size, backend: str, seed: int, ranks: Ranks = ALONE) -> LanguageModel:
    """A model whose initial weights depend only on the seed."""
    torch.manual_seed(seed)
    reference = LanguageModel(size, tk_modeling.reference)
    if backend == "reference":
        return reference
    model = LanguageModel(size, tk_modeling, fp8=backend == "fp8", ep=ranks.buffer)
    state = reference.state_dict()
    model.load_state_dict({name: ranks.share(x) if is_expert(name) else x for name, x in state.items()})
    return model


def compile_layers(model: LanguageModel) -> None:
    """Compile each kind of layer once: compiling the whole model takes minutes, as it repeats the layers."""
    # Enough for all kinds of layers, with gradients and without.
    torch._dynamo.config.recompile_limit = 32
    for layer in (*model.engrams.values(), *model.attentions, *model.feed_forwards, model.head):
        layer.compile()


# Training


class Optimizer:
    """AdamW on float32 copies of the weights: bf16 would round small steps away."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        for name, weight in model.named_parameters():
            parts[ranks.number > 1 and is_expert(name)].append(weight)
        self.num_shared = len(parts[0])
        self.weights = [*parts[0], *parts[1]]
        self.copies = [weight.detach().to(torch.float32, copy=True) for weight in self.weights]
        for copy in self.copies:
            copy.grad = torch.empty_like(copy)
        self.adamw = torch.optim.AdamW(self.copies, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Clip the norm of all gradients to 1, update the weights, drop the gradients."""
        gradients = [copy.grad for copy in self.copies]
        # torch's own optimizers use _foreach: one launch for many tensors.
        torch._foreach_copy_(gradients, [weight.grad for weight in self.weights])
        for weight in self.weights:
            weight.grad = None
        # An expert's gradient is of all processes' losses already.
        for gradient in gradients[: self.num_shared]:
            self.ranks.sum(gradient)
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        norm = (squares[: self.num_shared].sum() + self.ranks.sum(squares[self.num_shared :].sum())).sqrt()
        nn.utils.clip_grads_with_norm_(self.copies, 1.0, norm)
        self.adamw.param_groups[0]["lr"] = learning_rate
        self.adamw.step()
        torch._foreach_copy_(self.weights, self.copies)


def learning_rate(step: int, steps: int) -> float:
    """Relative to the highest: a linear warm-up over a tenth of the steps, then half a cosine down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up))


class CheckpointError(ValueError):
    """A run cannot go on from a checkpoint."""


class Trainer:
    """A model, its optimizer and its place in the data after some steps of a run."""

    def __init__(self, run: Run) -> None:
        # Deterministic algorithms cost little on a CPU.
        torch.use_deterministic_algorithms(run.deterministic or run.device.type == "cpu")
        torch.utils.deterministic.fill_uninitialized_memory = False
        if run.deterministic:
            # cuBLAS reads this variable when it is first used.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Float32 products may use TF32 on a GPU.
        torch.set_float32_matmul_precision("high")
        self.run = run
        self.train_text, self.held_out, self.description = read_text(run.device)
        self.model = make_model(run.size, run.backend, run.seed, run.ranks).to(run.device)
        if run.compile:
            compile_layers(self.model)
        self.optimizer = Optimizer(self.model, run.ranks)
        self.generator = torch.Generator().manual_seed(run.seed)
        self.step, self.steps = 0, run.steps or run.size.steps
        # A checkpoint is loaded only into a run of the same identity.
        self.identity = f"{run.size}, seed {run.seed}, {self.description}"
        if run.ranks.number > 1:
            self.identity += f", process {run.ranks.index} of {run.ranks.number}"

    def train_step(self) -> tuple[Tensor, float]:
        """Take a step; return the loss, which the GPU may still be computing, and the learning rate."""
        size, ranks = self.run.size, self.run.ranks
        starts = torch.randint(len(self.train_text) - size.length, (size.batch,), generator=self.generator)
        loss, auxiliary = self.model.loss(*windows(self.train_text, ranks.share(starts), size.length))
        # The batch's loss is the sum of these.
        ((loss + auxiliary) / ranks.number).backward()
        rate = size.learning_rate * learning_rate(self.step, self.steps)
        self.optimizer.step(rate)
        for connection in self.model.feed_forwards:
            connection.sublayer.moe.router.update_bias()
        self.step += 1
        return ranks.sum(loss.detach() / ranks.number), rate

    @torch.no_grad()
    def validation_loss(self, batches: int = 4) -> float:
        """Mean cross-entropy over windows spread evenly over the held-out text."""
        text, size, ranks = self.held_out, self.run.size, self.run.ranks
        number = batches * size.batch
        starts = torch.arange(number) * (len(text) - size.length - 1) // number
        self.model.eval()
        parts = [ranks.share(part) for part in starts.split(size.batch)]
        losses = [self.model.loss(*windows(text, part, size.length))[0] for part in parts]
        self.model.train()
        return ranks.sum(torch.stack(losses).mean() / ranks.number).item()

    def save(self, path: Path) -> None:
        """Write all that the next step depends on, to a temporary file that is then renamed to `path`."""
        cuda = self.run.device.type == "cuda"
        state = {
            "identity": self.identity,
            "step": self.step,
            "steps": self.steps,
            "model": self.model.state_dict(),
            "copies": self.optimizer.copies,
            "adamw": self.optimizer.adamw.state_dict(),
            "data": self.generator.get_state(),
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state(self.run.device) if cuda else None,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. Raises CheckpointError if it is of another run, or longer than this one."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            identity = state["identity"]
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: expected a checkpoint of this example, got another file") from error
        if identity != self.identity:
            raise CheckpointError(f"{path}: expected a checkpoint of {self.identity}, got one of {identity}")
        self.step, self.steps = state["step"], self.run.steps or state["steps"]
        if self.run.ranks.sum(torch.tensor(self.step, device=self.run.device)) != self.step * self.run.ranks.number:
            raise CheckpointError(f"{path}: expected the step of the other processes, got {self.step}")
        if self.steps < self.step:
            raise CheckpointError(f"{path}: expected --steps of at least its {self.step}, got {self.steps}")
        self.model.load_state_dict(state["model"])
        for copy, saved in zip(self.optimizer.copies, state["copies"], strict=True):
            copy.copy_(saved)
        self.optimizer.adamw.load_state_dict(state["adamw"])
        self.generator.set_state(state["data"])
        torch.set_rng_state(state["random"])
        if self.run.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"], self.run.device)


def mark(device: torch.device) -> Any:
    """A point in time: on a GPU an event in its stream, for which the host does not wait."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two marks that the device has passed."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


@contextmanager
def interrupts_noted() -> Iterator[list[int]]:
    """Within it, the first Ctrl-C is only added to the list, so that the step at hand is completed."""
    noted: list[int] = []

    def note(number: int, _: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def train_interval(trainer: Trainer, interrupts: list[int]) -> list[Entry]:
    """Train to the next step at which losses and times are read, or to an interrupt."""
    run, taken = trainer.run, []
    while not taken or not (interrupts or is_due(trainer, READ_EVERY) or is_due(trainer, run.save_every)):
        start = mark(run.device)
        loss, rate = trainer.train_step()
        taken.append((loss, rate, start, mark(run.device)))
    losses = torch.stack([loss for loss, *_ in taken]).tolist()
    first = trainer.step - len(taken) + 1
    return [
        {"step": first + i, "loss": losses[i], "seconds": seconds_between(start, end), "learning_rate": rate}
        for i, (_, rate, start, end) in enumerate(taken)
    ]


def is_due(trainer: Trainer, every: int) -> bool:
    """Whether what is done after `every` steps, and after the last one, is due."""
    return trainer.step % every == 0 or trainer.step == trainer.steps


def train(run: Run, resume: bool, console: Console) -> LanguageModel:
    """Train to the last step, with a log, checkpoints and a progress bar.

    Raises KeyboardInterrupt after Ctrl-C, for which it writes a checkpoint, and CheckpointError.
    """
    trainer = Trainer(run)
    console.print(trainer.description, highlight=False)
    checkpoint, log = run.out / "checkpoint.pt", run.out / "log.jsonl"
    if resume:
        trainer.load(checkpoint)
    run.out.mkdir(parents=True, exist_ok=True)
    # Steps after the checkpoint are repeated.
    kept = log.read_text().splitlines(keepends=True)[: trainer.step] if resume else []
    log.write_text("".join(kept))
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    # Several processes would not stop after the same step.
    noted = interrupts_noted() if run.ranks.buffer is None else nullcontext([])
    with Progress(*columns, console=console) as progress, noted as interrupts:
        bar = progress.add_task("", total=trainer.steps, completed=trainer.step)
        while trainer.step < trainer.steps and not interrupts:
            entries = train_interval(trainer, interrupts)
            last, speed = entries[-1], run.size.batch * run.size.length / median_seconds(entries)
            state = f"loss {last['loss']:.3f}, {speed:,.0f} tokens/s"
            progress.update(bar, completed=trainer.step, description=state)
            if is_validated := is_due(trainer, run.save_every):
                loss = last["validation_loss"] = trainer.validation_loss()
                validation = f"validation loss {loss:.3f} ({loss / math.log(2):.3f} bits per byte)"
                progress.console.print(f"step {trainer.step}: {state}, {validation}", highlight=False)
            with log.open("a") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
            if is_validated or interrupts:
                trainer.save(checkpoint)
    if trainer.step < trainer.steps:
        raise KeyboardInterrupt
    return trainer.model


# Results


def read_log(out: Path) -> list[Entry]:
    """The steps of a run."""
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def series(log: list[Entry], key: str) -> dict[int, float]:
    """A number by step, where the log has it."""
    return {entry["step"]: entry[key] for entry in log if key in entry}


def median_seconds(log: list[Entry]) -> float:
    """Median time of a step after the warm-up; a short log's warm-up is its first half."""
    return statistics.median(entry["seconds"] for entry in log[min(WARM_UP_STEPS, len(log) // 2) :])


def averaged(logs: Iterable[list[Entry]]) -> int:
    """Steps over which the losses of these runs are averaged: `AVERAGED`, or as many as the shortest has."""
    return min(AVERAGED, *map(len, logs))


def means(log: list[Entry], steps: int) -> dict[int, float]:
    """Mean loss of so many steps, by the last of them."""
    losses = list(series(log, "loss").values())
    return {end: statistics.fmean(losses[end - steps : end]) for end in range(steps, len(losses) + 1)}


def differences(log: list[Entry], first: list[Entry], steps: int) -> dict[int, float]:
    """Difference of the mean loss from that of the first run, by step, as far as both runs go."""
    expected = means(first, steps)
    return {step: loss - expected[step] for step, loss in means(log, steps).items() if step in expected}


def plot(logs: dict[str, list[Entry]], path: Path) -> None:
    """Draw each run's loss by step, its means and validation losses, and the differences from the first run."""
    from matplotlib.figure import Figure

    first, *others = logs.values()
    steps = averaged(logs.values())
    figure = Figure(figsize=(8, 6), layout="constrained")
    panels = figure.subplots(2 if others else 1, sharex=True, squeeze=False, height_ratios=(3, 1) if others else None)
    for i, (name, log) in enumerate(logs.items()):
        color, style = f"C{i}", ("-", "--", ":")[i % 3]

        def draw(row: int, values: dict[int, float], style: str, color: str = color, **options: Any) -> None:
            panels[row, 0].plot(list(values), list(values.values()), style, color=color, **options)

        draw(0, series(log, "loss"), style, alpha=0.25)
        draw(0, means(log, steps), style, label=f"{name}, mean of {steps} steps")
        draw(0, series(log, "validation_loss"), "ox+"[i % 3], label="validation")
        if log is not first:
            draw(1, differences(log, first, steps), style)
    panels[0, 0].set(ylabel="loss, nats per byte")
    panels[0, 0].legend()
    if others:
        panels[1, 0].set(ylabel="less the first")
    panels[-1, 0].set(xlabel="step")
    figure.savefig(path, dpi=120)


def results_table(logs: dict[str, list[Entry]], tokens: int) -> Table:
    """Loss and speed of each run, all of the same size, and its difference from the first."""
    steps = averaged(logs.values())
    table = Table(caption=f"time: median step; off: largest difference of the mean loss of {steps} steps")
    table.add_column("run")
    for heading in ("first loss", "last mean", "validation", "time", "tokens/s", "× first", "off"):
        table.add_column(heading, justify="right", no_wrap=True)
    first = next(iter(logs.values()))
    for name, log in logs.items():
        seconds, mean = median_seconds(log), means(log, steps)
        validations = list(series(log, "validation_loss").values())  # none in a run that was interrupted early
        off = max(map(abs, differences(log, first, steps).values()))
        validation = f"{validations[-1]:.3f}" if validations else "–"
        losses = f"{log[0]['loss']:.3f}", f"{mean[len(log)]:.3f}", validation
        speed = f"{seconds * 1e3:,.1f} ms", f"{tokens / seconds:,.0f}", f"{seconds / median_seconds(first):.2f}"
        table.add_row(name, *losses, *speed, f"{off:.4f}")
    return table


@torch.no_grad()
def sample(model: LanguageModel, length: int, prompt: bytes, seed: int) -> str:
    """The prompt and what the model writes after it, `length` bytes together."""
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    model.eval()
    while len(written) < length:
        tokens = torch.tensor([written], dtype=torch.int32, device=model.position.weight.device)
        # Eager, as every length would be compiled separately.
        with torch.compiler.set_stance("force_eager"):
            logits = model(tokens)[0][0, -1]
        probabilities = (logits.cpu() / 0.8).softmax(0)
        written.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "?" for byte in written)


# Command line


def device_named(name: str | None) -> torch.device:
    """The device of this name; without a name a GPU if there is one, else the CPU."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
        why = "" if device.type in ("cpu", "cuda") else "the ops run on these two only"
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
    if why:
        raise typer.BadParameter(f"expected cpu, cuda or cuda:N, got {name} ({why})", param_hint="--device")
    return device


def join_ranks(size: Size, device: torch.device) -> tuple[Ranks, torch.device]:
    """The processes that torchrun has started, or this one alone, with a buffer for their tokens; its own device."""
    from moe_layer_ep import join_group

    device = join_group(device.type)
    number = dist.get_world_size()
    if size.batch % number or size.experts % number:
        expected = f"expected processes that share out {size.batch} windows and {size.experts} experts, got {number}"
        raise typer.BadParameter(expected, param_hint="--expert-parallel")
    sizes = {"hidden": size.hidden, "num_topk": size.topk}
    tokens = size.batch // number * size.length
    buffer = tk_ep.ElasticBuffer(dist.group.WORLD, num_max_tokens_per_rank=tokens, **sizes)
    return Ranks(buffer.rank_idx, number, buffer), device


def require_log(folder: Path) -> None:
    """Refuse a folder to compare with before training, not after it."""
    try:
        if series(read_log(folder), "loss"):
            return
    except (OSError, ValueError, TypeError, LookupError):
        pass
    raise typer.BadParameter(f"expected a folder with the log of a run, got {folder}", param_hint="--compare")


def prepare_folder(out: Path, resume: bool) -> None:
    """Make the folder for results, or refuse it."""
    try:
        found = (out / "checkpoint.pt").exists()
        if found and not resume:
            raise typer.BadParameter(
                f"expected a folder without a checkpoint, or --resume, got {out}", param_hint="--out"
            )
        if resume and not found:
            raise typer.BadParameter(f"expected a folder with a checkpoint, got {out}", param_hint="--out")
        out.mkdir(parents=True, exist_ok=True)
        (out / "log.jsonl").touch()
    except OSError as error:
        message = f"expected a folder that can be written, got {out}: {error.strerror}"
        raise typer.BadParameter(message, param_hint="--out") from error


def main(
    size: Annotated[Literal["tiny", "small"], typer.Option(help="tiny for a CPU, small for a GPU.")] = "tiny",
    backend: Annotated[
        Literal["kernels", "fp8", "reference"] | None,
        typer.Option(help="Default: kernels on a GPU, else reference (plain PyTorch, none of the ops)."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Default: 200 for tiny, 300 for small; with --resume, the checkpoint's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. Default: runs/SIZE-BACKEND.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint in --out, also to more --steps.")
    ] = False,
    compare: Annotated[
        list[Path] | None,
        typer.Option(exists=True, file_okay=False, help="Folder, of another name, of a run to show too; repeatable."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of weights and batches.")] = 0,
    compile: Annotated[bool, typer.Option(help="Use torch.compile.")] = False,
    deterministic: Annotated[bool, typer.Option(help="Same bits in every run on a GPU, too; slower.")] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints, each with a validation.")] = 50,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; a GPU if there is one.")] = None,
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Share out batches and experts among torchrun's processes.")
    ] = False,
) -> None:
    """Train a byte-level language model on Python's standard library."""
    where = device_named(device)
    backend = backend or ("kernels" if where.type == "cuda" or expert_parallel else "reference")
    if backend == "reference" and expert_parallel:
        expected = "expected kernels or fp8 with --expert-parallel, got reference"
        raise typer.BadParameter(expected, param_hint="--backend")
    if backend == "fp8" and (SIZES[size].hidden % 128 or SIZES[size].intermediate % 128):
        expected = f"kernels or reference for {size}: FP8 takes multiples of 128 channels"
        raise typer.BadParameter(f"expected {expected}, got fp8", param_hint="--backend")
    ranks, where = join_ranks(SIZES[size], where) if expert_parallel else (ALONE, where)
    out = out or Path("runs", f"{size}-{backend}" + (f"-{ranks.number}-processes" if expert_parallel else ""))
    out = out / f"process{ranks.index}" if ranks.index else out
    folders = {folder.name: folder for folder in (out, *(compare or []))}
    if len(folders) <= len(compare or []):
        raise typer.BadParameter(f"expected folders of other names than {', '.join(folders)}", param_hint="--compare")
    for folder in compare or []:
        require_log(folder)
    prepare_folder(out, resume)
    # Wide enough for every column where the output is not a terminal.
    console = Console(width=None if Console().is_terminal else 120, quiet=ranks.index > 0)
    run = Run(SIZES[size], backend, steps, seed, out, where, compile, deterministic, save_every, ranks)
    try:
        model = train(run, resume, console)
    except CheckpointError as error:
        raise typer.BadParameter(str(error), param_hint="--resume") from error
    except KeyboardInterrupt as error:
        is_saved = (out / "checkpoint.pt").exists()
        how = f"the same command with --resume goes on from {out}" if is_saved else "nothing was saved"
        console.print(f"interrupted; {how}", highlight=False)
        raise typer.Exit(130) from error
    logs = {name: read_log(folder) for name, folder in folders.items()}
    plot(logs, out / "loss.png")
    console.print(results_table(logs, run.size.batch * run.size.length))
    console.print(sample(model, 100, b"def ", seed), markup=False, highlight=False)
    console.print(f"log, plot and checkpoint: {out}", highlight=False)
    if ranks.buffer is not None:
        ranks.buffer.destroy()
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
