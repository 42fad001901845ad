"""`python -m bench`: measure, and write bench/records/DATE-cpu-speed.{md,json}.

Everything (25 minutes on two cores): shapes A and B in bf16 and fp32 against every peer; the expert FFN against a dense one; attention in
blocks against PyTorch's fused one; A with 96 experts against the dense model of its active size. --quick (3 minutes): A in bf16 against
one variant of each peer, the expert FFN and attention in bf16.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from bench import attention
from bench.attention import AttentionResult
from bench.compare import OURS, OURS_COMPILED, PEERS, PEERS_QUICK, PEERS_SLOW_START, Pair, Table, compare, compare_ours
from bench.experts import ExpertResult, measure
from bench.record import write
from bench.session import Participant

PARTS = ("models", "experts", "attention", "sparse")


def _models(args: argparse.Namespace) -> Iterator[Table]:
    for shape in args.shapes:
        for precision in args.precisions:
            peers: tuple[Participant, ...] = PEERS_QUICK
            if not args.quick:
                # Compiling takes a minute a model: in bf16, the precision of training, and everywhere when asked.
                slow = precision == "bf16" or args.full
                peers = (*PEERS, OURS_COMPILED, *(PEERS_SLOW_START if slow else ()))
            yield compare(shape, precision, [p for p in peers if not args.only or args.only in p.name], args.rounds)


def _experts(args: argparse.Namespace) -> Iterator[ExpertResult]:
    for precision in args.precisions:
        for num_experts in (32, 128):
            for skew in (1, 4):
                yield measure(num_experts, skew, precision, 3 * args.rounds)
    if not args.quick:
        # What `auto` decides between.
        for backend in ("loop", "batched", "grouped"):
            for skew in (1, 4):
                yield measure(32, skew, args.precisions[0], args.rounds, backend)


def _attention(args: argparse.Namespace) -> Iterator[AttentionResult]:
    for precision in args.precisions:
        for packed in (False, True):
            yield attention.measure(precision, packed, 5 * args.rounds)


def _sparse(args: argparse.Namespace) -> Iterator[tuple[str, Pair]]:
    for precision in args.precisions:
        yield precision, compare_ours(("A96", OURS), ("dense", OURS), precision, args.rounds + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="A in bf16 and few rounds")
    parser.add_argument("--full", action="store_true", help="compile the peers in fp32 too (30 minutes more)")
    parser.add_argument("--rounds", type=int, help="rounds of one step each (4; quick: 2)")
    parser.add_argument("--shapes", nargs="+", choices=["A", "B"], help="(A B; quick: A)")
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "fp32"], help="(bf16 fp32; quick: bf16)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", help="peers whose name contains this")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 4)
    args.shapes = args.shapes or (["A"] if args.quick else ["A", "B"])
    args.precisions = args.precisions or (["bf16"] if args.quick else ["bf16", "fp32"])
    experts = list(_experts(args)) if "experts" in args.parts else []
    attentions = list(_attention(args)) if "attention" in args.parts else []
    tables = list(_models(args)) if "models" in args.parts else []
    sparse = list(_sparse(args)) if "sparse" in args.parts and not args.quick else []
    path = write(tables, experts, attentions, sparse, args.quick)
    print(path.read_text())
    print(f"bench: wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
