"""``python -m sb3_acer``, which is also the console script ``sb3-acer``."""

import sys
from importlib import import_module

from sb3_acer import __version__
from sb3_acer.distributed import is_outside_group
from sb3_acer.extras import require_packages

SUMMARIES = {
    "train": "train an agent, evaluate it and plot its learning curve (without arguments: on CartPole-v1)",
    "enjoy": "watch a saved agent, or record a video of it if there is no screen",
    "tune": "search for hyperparameters, on one machine or several",
    "plot-train": "plot the reward, length or success rate of the training episodes",
    "all-plots": "plot the evaluations made during training, of one or more agents, and print a table",
    "plot-from-file": "plot what all-plots has saved with --output, for at least two runs of each agent",
    "record-video": "record a video of a saved agent",
    "record-training": "record a video of an agent's progress: its checkpoints (train --save-freq) one after another",
    "benchmark": "evaluate each environment's newest agent in --log-dir (none of the hub) and write a table",
    "push-to-hub": "upload a saved agent to the Hugging Face hub, with a model card and a video",
    "zoo-path": "print a folder for PYTHONPATH, with which rl-zoo's own commands know --algo acer",
    "run-atari": "train on an Atari game, like stable-baselines' run_atari",
    "export": "write a saved agent's policy as an ONNX file",
    "migrate": "convert an agent saved by stable-baselines",
}
"""what each command does; here, since the help needs no extra"""

# The modules of the commands that are not rl-zoo's.
OWN = {
    "export": "sb3_acer.export.onnx",
    "migrate": "sb3_acer.sb2_compat.migration",
    "run-atari": "sb3_acer.atari.run",
}

# Packages that rl-zoo's scripts need; rl_zoo3 does not declare all of them.
REQUIRED = ("rl_zoo3", "tqdm", "rich", "requests")
REQUIRED_BY = {
    **dict.fromkeys(("plot-train", "all-plots", "plot-from-file"), ("seaborn", "scipy")),
    **dict.fromkeys(("record-video", "record-training", "push-to-hub"), ("moviepy",)),
}


def usage() -> str:
    commands = "\n".join(f"  {name:<17}{summary}" for name, summary in SUMMARIES.items())
    return (
        f"sb3-acer {__version__}: rl-zoo's commands, with ACER\n\nusage: sb3-acer COMMAND [ARGUMENTS]\n\n{commands}\n\n"
        f"sb3-acer COMMAND --help lists the arguments: rl-zoo's, but for {', '.join(OWN)}."
    )


def main() -> int:
    try:
        return run(*(sys.argv[1:] or ["--help"]))
    except KeyboardInterrupt:  # train has saved its agent by then
        return 130


def run(command: str, *arguments: str) -> int:
    if command in ("-h", "--help"):
        print(usage())
        return 0
    if command == "--version":
        print(f"sb3-acer {__version__}")
        return 0
    if command not in SUMMARIES:
        print(f"sb3-acer: command must be one of {', '.join(SUMMARIES)}, got {command!r}", file=sys.stderr)
        return 2
    if is_outside_group() and command != "train":
        print(f"sb3-acer: torchrun must start train, got {command!r}", file=sys.stderr)
        return 2
    try:
        if command in OWN:
            import_module(OWN[command]).main([*arguments])
            return 0
        require_packages("rl-zoo", "zoo", *REQUIRED, *REQUIRED_BY.get(command, ()))
    except ImportError as error:
        print(f"sb3-acer {command}: {error}", file=sys.stderr)
        return 2
    from sb3_acer.zoo import commands

    commands.main([command, *arguments])
    return 0


if __name__ == "__main__":
    sys.exit(main())
