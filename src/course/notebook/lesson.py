"""What a notebook opens with: the stage, the machine, the tier and the model."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property
from types import ModuleType

import torch
from IPython.display import Markdown, display

from course.measure.machine import Machine, fingerprint
from course.measure.roofline import Roofline, probe, probe_now
from course.measure.split import host_overhead, narrow
from course.model import Decoder, LoadedModel, ModelConfig, ModelUnavailable, Tokenizer, load
from course.model.fetch import SMOLLM2
from course.model.seeded import seeded_decoder
from course.notebook.figures import use_style
from course.notebook.prediction import Prediction
from course.notebook.prose import bytes_text, say
from course.notebook.published import show_published
from course.notebook.source import excerpt
from course.parts import load_part
from course.syllabus import Stage, load_syllabus

__all__ = ["Lesson", "reference"]


def reference(number: int) -> ModuleType:
    """The worked solution of a stage, as a module.

    Raises:
        UnknownStage: there is no such stage.
    """
    return load_part(load_syllabus().find(number))


class Lesson:
    """The notebook of one stage, on the reference.

    Loads the real model, or `nano` where it cannot be had, and says so; sets the style of the
    figures; and shows on what all that follows was measured. The environment variable
    ``COURSE_NOTEBOOK_MODEL`` names another model: `nano`, a folder, a hub id.

    Raises:
        UnknownStage: there is no such stage.
    """

    def __init__(self, number: int) -> None:
        use_style()
        self.stage: Stage = load_syllabus().find(number)
        self.machine: Machine = fingerprint()
        self.loaded, missing = _load()
        display(Markdown(self._banner(missing)))

    @property
    def model(self) -> Decoder:
        """The model that this notebook runs on."""
        return self.loaded.model

    @property
    def config(self) -> ModelConfig:
        """Its shape."""
        return self.loaded.config

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        return self.loaded.tokenizer

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.model.device

    @property
    def tier(self) -> str:
        """`cpu` or `cuda`."""
        return self.device.type

    @cached_property
    def roofline(self) -> Roofline:
        """What this machine reaches in the model's dtype: the better of now and of before.

        Noise only ever makes a machine slower, so the better figure is the truer one.
        """
        dtypes = (self.model.dtype,)
        now = probe_now(self.device, dtypes)
        return now.better_of(probe(self.device, dtypes=dtypes))

    def host_overhead(
        self,
        step_of: Callable[[Decoder], Callable[[], object]],
        config: ModelConfig | None = None,
    ) -> float:
        """Seconds that the host needs for a step, whatever the model computes.

        step_of(model) gives a step of that model. It is timed on one of the same depth that is so
        narrow that nothing is left to read or to multiply. config: of another model than the
        notebook's own.
        """
        shape = narrow(config or self.config)
        model = seeded_decoder(shape, device=self.device, dtype=self.model.dtype)
        return host_overhead(step_of(model), self.device)

    @property
    def reference(self) -> ModuleType:
        """The worked solution of this stage."""
        return reference(self.stage.number)

    def code(self, name: str) -> None:
        """Show a function, class or method of the reference, as its file has it."""
        display(Markdown(excerpt(self.stage.reference, name).markdown))

    def predict(self, guess: float, unit: str = "") -> Prediction:
        """Ask this stage's question, and note the reader's guess."""
        prediction = Prediction(self.stage.predict, guess, unit)
        say(f"**{prediction.question}** Your guess: {guess:,g}{unit}.")
        return prediction

    def published(self) -> None:
        """Show what the reference measured on a GPU, where that was published."""
        show_published(self.stage)

    def _banner(self, missing: str) -> str:
        m, config = self.machine, self.config
        weights = bytes_text(config.num_weights * self.model.embed.weight.element_size())
        dtype = str(self.model.dtype).removeprefix("torch.")
        gpus = ", ".join(m.gpus) or "none"
        memory = f"{m.memory_bytes / 2**30:.0f} GiB"
        lines = [
            "| measured on | |",
            "|:---|:---|",
            f"| machine | {m.cpu}, {m.cores} cores, {memory}; GPU: {gpus} |",
            f"| software | {m.os}, Python {m.python}, torch {m.torch},"
            f" {torch.get_num_threads()} threads |",
            f"| tier | {self.tier} |",
            f"| model | {self.loaded.name}: {config.num_layers} layers, hidden size"
            f" {config.hidden_size}, {config.num_heads} query heads, {config.num_kv_heads} KV"
            f" heads, vocabulary {config.vocab_size:,}; {weights} in {dtype} |",
            f"| weights | {self.loaded.source}; hash {self.loaded.weights_hash} |",
        ]
        if missing:
            lines += ["", f"**The real model is not here, so this ran on `nano`**: {missing}"]
        return "\n".join(lines)


def _load() -> tuple[LoadedModel, str]:
    """The model, and why it is not the real one where that was wanted."""
    chosen = os.environ.get("COURSE_NOTEBOOK_MODEL")
    try:
        return load(chosen or SMOLLM2), ""
    except ModelUnavailable as error:
        if chosen:
            raise
        return load("nano"), " ".join(str(error).split())
