"""How good is the policy on each prompt? Monte-Carlo oracle values V(x) = E[reward | x] → a JSONL table.

    python Gradient_evaluation/calculate_oracle_v.py --model data/tiny_model \
        --dataset outputs/demo/problems.jsonl --n_oracle 256 --out_dir outputs/demo
    python Gradient_evaluation/calculate_oracle_v.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --dataset Kyleyee/arithmetic-test --split test --out_dir outputs/qwen

For every prompt of the data set (columns ``prompt`` and ``ground_truth``) it samples n_oracle continuations from exactly the
sampling law that the flags describe. It writes one row to ``out_dir/oracle_v_n{n_oracle}_{model}.jsonl`` as soon as the
prompt is done: all input columns, V_oracle and its standard error, and what made it. Run it again and it continues where
it stopped. The tiny model takes about a second per prompt on two CPU cores. The loop over prompts is in runs/oracle.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import MOST_CONTINUATIONS, Parser, add_shared_flags, importing, integer, run
from Gradient_evaluation.settings import OracleSettings


def parse_args() -> OracleSettings:
    parser = Parser(description=__doc__.split("\n")[0])
    add_shared_flags(parser)
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", default="Kyleyee/arithmetic-test", help="hub id, or a local file or folder")
    data.add_argument("--split", default="train", help="split of a hub or saved data set (%(default)s)")
    data.add_argument(
        "--n_oracle", type=integer(1, MOST_CONTINUATIONS), default=1000, help="continuations per prompt (%(default)s)"
    )
    data.add_argument("--batch_size", type=integer(1), default=32, help="continuations at a time (%(default)s)")
    data.add_argument("--out_dir", default="oracle_v_results", help="folder of the table (%(default)s)")
    return OracleSettings.of(parser.parse_args())


def main() -> None:
    settings = parse_args()
    with importing():
        from Gradient_evaluation.runs import oracle
    oracle.run(settings)


if __name__ == "__main__":
    run(main)
