"""The header in which every client sends its token."""

from atroposlib.errors import AtroposError


class UnusableToken(AtroposError):
    """A token that no header carries. The message names the flag, never the token."""


def bearer(token: str | None, flag: str) -> dict[str, str]:
    """Return the header with `token`, which `flag` gave; none without a token. Raises UnusableToken: an HTTP library's
    own error would name neither, or show the token.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise UnusableToken(f"{flag}: a token has printable ASCII characters and no space; correct it")
    return {"Authorization": f"Bearer {token}"}
