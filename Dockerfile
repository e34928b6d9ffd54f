# syntax=docker/dockerfile:1
# Images of this checkout with the environment that scripts/setup.sh makes; `ray` is `cuda` for deploy/kuberay.yaml:
#
#     docker build --target cpu -t atropos:cpu .
#     docker build --target cuda -t atropos:cuda .     the host needs NVIDIA's driver 580 or newer and its container toolkit
#
#     docker run --rm --init -v "$PWD/runs:/atropos/runs" atropos:cpu
#     docker run --rm --init --gpus all --shm-size 8g -v "$PWD/runs:/atropos/runs" atropos:cuda scripts/run_gsm8k_broadcast.sh MODEL
#
# docs/install.md says what of this was tried.

FROM debian:bookworm-slim AS base
# gcc and Python's headers: pycosat is built when it is installed, and Triton compiles at vLLM's first request.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        ca-certificates g++ gcc libc6-dev libnuma1 python3.11 python3.11-dev python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 atropos && install --directory --owner atropos /atropos
USER atropos
WORKDIR /atropos
COPY --chown=atropos . .
# The launchers take this Python as it is and set nothing up.
ENV ATROPOS_PYTHON=/atropos/.venv/bin/python PATH=/atropos/.venv/bin:$PATH
CMD ["scripts/quickstart.sh"]

FROM base AS cpu
RUN --mount=type=cache,target=/tmp/pip,uid=1000 PIP_CACHE_DIR=/tmp/pip scripts/setup.sh --cpu

FROM base AS cuda
RUN --mount=type=cache,target=/tmp/pip,uid=1000 PIP_CACHE_DIR=/tmp/pip scripts/setup.sh --gpu
# What NVIDIA's container toolkit asks an image for.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM cuda AS ray
RUN --mount=type=cache,target=/tmp/pip,uid=1000 PIP_CACHE_DIR=/tmp/pip pip install 'ray[default]==2.60.0'
