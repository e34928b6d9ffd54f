"""Clients follow no redirect: it could send prompts and keys to another server."""

SHOWN_CHARACTERS = 200


def refused_redirect(url: str, status: int, target: str | None) -> str | None:
    """Say what is wrong with the reply of `url` if it is a redirect: its target (Location header) and the remedy."""
    if not 300 <= status < 400:
        return None
    shown = ascii(target)[:SHOWN_CHARACTERS] if target else "nowhere"
    return (
        f"{url} replied {status}, a redirect to {shown}, which is not followed because it would send the request "
        "and its key there; if that is the intended server, configure its address"
    )
