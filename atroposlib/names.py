"""Valid names: at most 128 characters, all printable, since names reach logs, terminals, pages and file names."""

from typing import Annotated

from pydantic import AfterValidator

MAX_NAME = 128


def check_name(name: str) -> str:
    """`name` itself. Raises ValueError."""
    if len(name) > MAX_NAME:
        raise ValueError(f"a name has at most {MAX_NAME} characters, this one has {len(name)}")
    if not name.isprintable():
        raise ValueError(f"a name has at most {MAX_NAME} characters, all of them printable")
    return name


Name = Annotated[str, AfterValidator(check_name)]
