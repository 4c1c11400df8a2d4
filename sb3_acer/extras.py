"""How a message names the extras of pyproject.toml."""

import sys
from importlib.util import find_spec


def how_to_install(extra: str) -> str:
    """
    :param extra: of pyproject.toml
    :return: what to type; sb3_acer is on no package index, so its clone is where the extras are known
    """
    pins = "-c constraints.txt " if sys.version_info >= (3, 11) else ""  # some of their versions need 3.11
    return f'in the folder of your clone of sb3_acer, pip install {pins}".[{extra}]"'


def require_packages(what: str, extra: str, *packages: str) -> None:
    """
    :param what: what needs the packages
    :param extra: of pyproject.toml, which installs them
    :param packages: by their names in ``import``
    :raises ImportError: if one is missing
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ImportError(f"{what} needs {', '.join(missing)}: {how_to_install(extra)}")
