"""``python -m sb3_acer``, which is also the console script ``sb3-acer``."""

import sys
from importlib.util import find_spec

# What rl-zoo's train and enjoy cannot start without; some of it is not declared by rl_zoo3.
REQUIRED = ("rl_zoo3", "tqdm", "rich", "requests")


def main() -> int:
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        print(f'sb3-acer: {", ".join(missing)} not installed: pip install "sb3-acer[zoo]"', file=sys.stderr)
        return 2
    from sb3_acer import zoo

    return zoo.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
