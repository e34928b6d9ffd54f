"""One file per API that agents speak: `read`, `reply`, `events` and `error`, each of which only translates."""
