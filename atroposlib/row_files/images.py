"""Finds images that stand in the data itself, which can be shown without fetching anything."""

import re
from collections.abc import Mapping

IMAGE_URL = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")
# How the first bytes of each kind of image look in base64.
IMAGE_STARTS = {"iVBORw0KGgo": "png", "/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp"}


def image_url(image: object) -> str | None:
    """Return the data URL of an image that is one, or that is its base64; None for anything else."""
    if not isinstance(image, str):
        return None
    kind = next((kind for start, kind in IMAGE_STARTS.items() if image.startswith(start)), None)
    url = image if kind is None else f"data:image/{kind};base64,{image}"
    return url if IMAGE_URL.fullmatch(url) else None


def image_of_part(part: object) -> str | None:
    """Return the data URL of a message's part in the OpenAI chat format, if the part is such an image."""
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return None
    image = part.get("image_url")
    return image_url(image.get("url") if isinstance(image, Mapping) else None)
