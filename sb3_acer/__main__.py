"""``python -m sb3_acer``, which is also the console script ``sb3-acer``."""

import sys
from importlib import import_module
from importlib.util import find_spec

# Packages that rl-zoo's scripts need; rl_zoo3 does not declare all of them.
REQUIRED = ("rl_zoo3", "tqdm", "rich", "requests")
REQUIRED_BY = {
    "plot-train": ("seaborn", "scipy"),
    "all-plots": ("seaborn", "scipy"),
    "plot-from-file": ("seaborn", "scipy"),
    "record-video": ("moviepy",),
    "record-training": ("moviepy",),
    "push-to-hub": ("moviepy",),
}


# The modules of the commands that are not rl-zoo's.
OWN = {"migrate": "sb3_acer.sb2_compat.migration", "run-atari": "sb3_acer.atari.run"}


def main() -> int:
    command = "".join(sys.argv[1:2])
    if command in OWN:
        try:
            module = import_module(OWN[command])
        except ImportError as error:
            print(f"sb3-acer {command}: {error}", file=sys.stderr)
            return 2
        module.main(sys.argv[2:])
        return 0
    required = REQUIRED + REQUIRED_BY.get(command, ())
    missing = [name for name in required if find_spec(name) is None]
    if missing:
        print(f'sb3-acer: {", ".join(missing)} not installed: pip install "sb3-acer[zoo]"', file=sys.stderr)
        return 2
    from sb3_acer.zoo import commands

    return commands.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
