"""The reading order is the architecture: imports run downward only, and the library itself needs no extra."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

import sb3_acer
from tests.helpers import EXTRAS, in_a_fork_without

PACKAGE = Path(sb3_acer.__file__).parent

# The files of the algorithm, with what each may import of this package. A new file finds its place here first.
ALGORITHM: dict[str, set[str]] = {
    "estimators": set(),
    "distributions": set(),
    "checks": set(),
    "shared_memory": set(),
    "distributed": {"shared_memory"},
    "extras": set(),
    "parameters": set(),
    "schedules": {"checks"},
    "recurrent": {"checks"},
    "env_state": set(),
    "sequences": set(),
    "vec_normalize": {"sequences"},
    "finite": {"checks", "env_state", "sequences", "vec_normalize"},
    "frames": set(),
    "columns": {"frames"},
    "ring": {"columns", "frames"},
    "storage": {"checks"},
    "mlp": {"checks"},
    "heads": {"distributions", "estimators", "mlp"},
    "prediction": {"checks", "distributions", "sequences"},
    "policies": {"checks", "distributions", "heads", "mlp", "recurrent", "parameters", "prediction", "sequences"},
    "buffer": {"checks", "distributions", "frames", "ring", "sequences", "storage"},
    "arguments": {"buffer", "checks", "policies", "schedules"},
    "update": {"distributions", "estimators", "policies", "sequences"},
    "masks": {"checks", "distributions", "env_state"},
    "saving": {"arguments", "buffer", "checks", "policies", "storage"},
    "rollouts": {
        "arguments",
        "checks",
        "env_state",
        "finite",
        "frames",
        "masks",
        "saving",
        "sequences",
        "storage",
        "vec_normalize",
    },
    "data_parallel": {"arguments", "distributed", "rollouts", "vec_normalize"},
    "checkpoint": {"checks", "storage"},
    "callbacks": {"arguments"},
    "resuming": {
        "arguments",
        "callbacks",
        "checkpoint",
        "checks",
        "data_parallel",
        "distributed",
        "env_state",
        "storage",
    },
    "acer": {
        "arguments",
        "buffer",
        "checks",
        "data_parallel",
        "distributed",
        "distributions",
        "policies",
        "resuming",
        "rollouts",
        "sb2_compat.interface",
        "schedules",
        "sequences",
        "update",
        "vec_normalize",
    },
}
# A folder for each topic: files and folders of this package that it may import besides the algorithm and itself.
TOPICS: dict[str, set[str]] = {
    "export": set(),
    "sb2_compat": {"demonstrations"},
    "demonstrations": set(),
    "atari": {"__init__", "hyperparams"},
    "zoo": {"__init__", "__main__", "atari", "hyperparams", "sb2_compat"},
    "hyperparams": set(),
}


def imported(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path} has a relative import"  # noqa: PT018
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names if is_module(f"{node.module}.{alias.name}")}
    return names


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def own(path: Path) -> set[str]:
    """Of :func:`imported`, the modules of this package, by their names in it."""
    names = {name for name in imported(path) if name.split(".")[0] == "sb3_acer"}
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    return {name.removeprefix("sb3_acer").removeprefix(".") or "__init__" for name in names - packages}


def test_every_file_has_its_place() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*ALGORITHM, "__init__", "__main__"}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(TOPICS)


@pytest.mark.parametrize("name", ALGORITHM)
def test_the_algorithm_imports_downward_only(name: str) -> None:
    assert own(PACKAGE / f"{name}.py") <= ALGORITHM[name]
    order = list(ALGORITHM)
    assert ALGORITHM[name] - {"sb2_compat.interface"} <= set(order[: order.index(name)])


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_imports_the_algorithm_and_the_topics_below_it(topic: str) -> None:
    for path in (PACKAGE / topic).rglob("*.py"):
        for name in own(path):
            part = name.split(".")[0]
            assert part in {*ALGORITHM, topic, *TOPICS[topic]}, f"{path.relative_to(PACKAGE)} imports {name}"


def test_what_the_algorithm_imports_of_the_topics_does_not_import_the_algorithm_class() -> None:
    above = [PACKAGE / "sb2_compat" / "interface.py", *(PACKAGE / "demonstrations").glob("*.py")]
    for path in above:
        assert own(path).isdisjoint({"acer", "__init__", "zoo", "atari"}), path


def test_the_mathematics_knows_torch_and_no_more() -> None:
    assert imported(PACKAGE / "estimators.py") == {"torch"}


def test_every_test_file_is_of_a_file_of_the_package() -> None:
    tests = Path(__file__).parent
    for path in tests.rglob("test_*.py"):
        tested = PACKAGE / path.relative_to(tests).with_name(path.name.removeprefix("test_"))
        assert tested.is_file() or path.stem in (
            "test_architecture",
            "test_benchmarks",
            "test_calls",
            "test_cuda",
            "test_docs",
            "test_golden",
            "test_learning",
            "test_runs",
        ), path


def test_the_library_imports_no_optional_dependency() -> None:
    def learn() -> None:
        import_module("sb3_acer").ACER("MlpPolicy", "CartPole-v1").learn(40)

    assert in_a_fork_without((*EXTRAS, "matplotlib"), learn) == 0
