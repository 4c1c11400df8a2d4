"""
Scores of the documentation's own snippets with other seeds: what a reader gets who runs them as printed. Left out are
pages that only show how something is done, snippets of less than 20,000 steps or without a seed, and Atari, which takes
hours.

    python -m benchmarks.snippets [--seeds 11 12 13 14 15]
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch as th
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

from benchmarks.tables import RESULTS, SNIPPETS, replace

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "docs/pages/hyperparameters.md", "docs/pages/memory.md"]
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
STEPS = re.compile(r"model\.learn\((?:total_timesteps=)?([\d_]+)")


def snippets(page: str) -> Iterator[tuple[str, str, bool]]:
    """Name and code of each snippet, and whether it trains long enough."""
    for number, code in enumerate(SNIPPET.findall((ROOT / page).read_text()), 1):
        learns = STEPS.search(code)
        is_long = learns is not None and int(learns[1]) >= 20_000 and "seed=0" in code and "atari" not in code
        yield f"{page}, {number}", code, is_long


def score(namespace: dict[str, Any]) -> float:
    model = namespace["model"]
    env = model.get_env()
    if isinstance(env, VecNormalize):
        env.training = env.norm_reward = False
    return float(evaluate_policy(model, env, 100)[0])  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15])
    options = parser.parse_args()
    th.set_num_threads(1)
    for page in PAGES:
        for seed in options.seeds:
            namespace: dict[str, Any] = {"__name__": "__main__"}
            for name, code, is_long in snippets(page):
                if not is_long:  # only what it imports, which later ones need
                    exec("\n".join(line for line in code.splitlines() if re.match("import |from ", line)), namespace)
                    continue
                exec(code.replace("seed=0", f"seed={seed}"), namespace)
                mean = f"{score(namespace):.2f}"
                replace(
                    RESULTS / "snippets.csv",
                    SNIPPETS,
                    [{"snippet": name, "seed": str(seed), "mean": mean}],
                    SNIPPETS[:2],
                )
                print(f"{name}, seed {seed}: {mean}", flush=True)


if __name__ == "__main__":
    main()
