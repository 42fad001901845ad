"""Training steps of whole models, ours and a peer's in turn, so that whatever slows the machine down slows both."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.session import Participant, ParticipantError, Session
from bench.shapes import SHAPES

OURS = Participant("moe_train", "ours")
OURS_COMPILED = Participant("moe_train, compiled", "ours", compiled=True)
PEERS = (
    Participant("transformers eager", "transformers", "eager"),
    Participant("transformers batched_mm", "transformers", "batched_mm"),
    Participant("transformers grouped_mm", "transformers", "grouped_mm"),
    Participant("torchtitan (experts in bf16)", "torchtitan"),
    Participant("megatron-core", "megatron"),
    Participant("DeepSpeed, dropping (1.25)", "deepspeed", dropless=False),
)
PEERS_SLOW_START = (
    Participant("transformers eager, compiled", "transformers", "eager", compiled=True),
    Participant("transformers grouped_mm, compiled", "transformers", "grouped_mm", compiled=True),
    Participant("torchtitan (experts in bf16), compiled", "torchtitan", compiled=True),
    Participant("DeepSpeed, dropless", "deepspeed", "dropless"),
)
PEERS_QUICK = (PEERS[2], PEERS[3], PEERS[4], PEERS[5])


@dataclass
class Pair:
    """One comparison. seconds: of each step, in the order they ran; ratio: our tokens/s over theirs, one a round."""

    ours: str
    theirs: str
    dropless: bool
    seconds_ours: list[float] = field(default_factory=list)
    seconds_theirs: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    peak_theirs: int = 0
    failure: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


@dataclass
class Table:
    """All comparisons of one shape and precision."""

    shape: str
    precision: str
    facts: dict[str, Any] = field(default_factory=dict)
    peak_ours: int = 0
    pairs: list[Pair] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Ours: the median over all steps of all pairs."""
        steps = [seconds for pair in self.pairs for seconds in pair.seconds_ours]
        return SHAPES[self.shape].tokens / statistics.median(steps)

    @property
    def compiled_gain(self) -> float:
        """How much faster torch.compile makes ours (1 where it was not measured or does not help)."""
        ratios = [pair.ratio for pair in self.pairs if pair.theirs == OURS_COMPILED.name and pair.ratios]
        return max(1.0, *(1 / ratio for ratio in ratios)) if ratios else 1.0

    @property
    def best_dropless(self) -> Pair | None:
        measured = [pair for pair in self.pairs if pair.dropless and pair.ratios and not pair.theirs.startswith("moe_train")]
        return min(measured, key=lambda pair: pair.ratio, default=None)


def compare(shape: str, precision: str, peers: Sequence[Participant], rounds: int, ours: Participant = OURS) -> Table:
    """Our session lives on while one peer after the other comes and goes."""
    table = Table(shape, precision)
    with Session(ours, shape, precision) as our_session:
        table.facts = our_session.facts
        for peer in peers:
            pair = Pair(ours.name, peer.name, peer.dropless)
            table.pairs.append(pair)
            try:
                with Session(peer, shape, precision) as their_session:
                    _alternate(pair, our_session, their_session, rounds)
                    pair.peak_theirs = their_session.end()
                _say(f"{shape} {precision} {peer.name}: {pair.ratio:.2f} ({min(pair.ratios):.2f} … {max(pair.ratios):.2f})")
            except ParticipantError as error:
                pair.failure = str(error)
                _say(f"{shape} {precision} {peer.name}: failed: {error}")
        table.peak_ours = our_session.end()
    return table


def compare_ours(first: tuple[str, Participant], second: tuple[str, Participant], precision: str, rounds: int) -> Pair:
    """Two models of ours, (shape, participant) each; ratio > 1 where the first is faster."""
    pair = Pair(first[0], second[0], True)
    with Session(first[1], first[0], precision) as one, Session(second[1], second[0], precision) as two:
        _alternate(pair, one, two, rounds)
        pair.peak_theirs = two.end()
    return pair


def _alternate(pair: Pair, ours: Session, theirs: Session, rounds: int) -> None:
    """Round by round, who goes first changes."""
    for ours_first in _alternating(rounds):
        if ours_first:
            mine, other = ours.steps(1), theirs.steps(1)
        else:
            other, mine = theirs.steps(1), ours.steps(1)
        pair.seconds_ours += mine
        pair.seconds_theirs += other
        pair.ratios.append(other[0] / mine[0])


def _alternating(rounds: int) -> Iterator[bool]:
    return (index % 2 == 0 for index in range(rounds))


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)
