"""The reading order is the architecture: imports run downward only, and the library itself needs no extra."""

import ast
import subprocess
import sys
from pathlib import Path

import sb3_acer

PACKAGE = Path(sb3_acer.__file__).parent

# What each module may import of this package. A new module finds its place here first.
BELOW: dict[str, set[str]] = {
    "estimators": set(),
    "distributions": set(),
    "rmsprop": set(),
    "schedules": set(),
    "recurrent": set(),
    "policies": {"distributions", "estimators", "recurrent", "rmsprop"},
    "buffer": {"frames"},
    "recording": set(),
    "pretrain": {"policies", "distributions", "buffer", "recording"},
    "compatibility": {"policies", "buffer", "pretrain"},
    "frames": set(),
    "acer": {"estimators", "distributions", "policies", "buffer", "compatibility", "frames", "rmsprop", "schedules"},
    "untrusted": set(),
    "old_networks": {"policies", "untrusted"},
    "migration": {"acer", "old_networks", "untrusted"},
    "registration": {"__init__", "policies", "rmsprop"},
    "screen": set(),
    "atari": set(),
    "run_atari": {"__init__", "atari"},
    "zoo": {"__init__", "migration", "registration", "run_atari", "screen"},
    "__init__": {"acer", "buffer", "migration", "policies", "pretrain", "recording"},
    "__main__": {"__init__", "zoo"},
}
OPTIONAL = (
    "rl_zoo3",
    "optuna",
    "matplotlib",
    "moviepy",
    "rich",
    "tqdm",
    "tensorboard",
    "ale_py",
    "cv2",
    "seaborn",
    "scipy",
)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "sb3_acer"}
    return names


def test_imports_run_downward_only() -> None:
    modules = {path.stem: path for path in PACKAGE.glob("*.py")}
    assert set(modules) == set(BELOW)
    for name, path in modules.items():
        siblings = {module.removeprefix("sb3_acer.") for module in imported(path) if module.startswith("sb3_acer.")}
        assert siblings & set(modules) <= BELOW[name], f"{name} imports {siblings}"


def test_the_mathematics_knows_torch_and_no_more() -> None:
    assert imported(PACKAGE / "estimators.py") == {"torch"}


def test_the_library_imports_no_optional_dependency() -> None:
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in OPTIONAL)
    code = f"import sys; {blocked}; import sb3_acer; sb3_acer.ACER('MlpPolicy', 'CartPole-v1').learn(40)"
    # stable-baselines3's logger looks for matplotlib and tensorboard itself, and does without
    finished = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
