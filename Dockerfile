# Tether with everything that `make test` needs, in .venv as on any machine.
#
#   docker build -t tether .                                                   the torch build that pip finds (with CUDA on x86-64)
#   docker build -t tether --build-arg TORCH_INDEX=<index of the CPU build> .  a smaller image, for machines without a GPU
#   docker run --rm tether make test
#   docker run --rm --gpus all -v "$PWD/runs:/tether/runs" tether .venv/bin/tether train frozen_lake --steps 20 --out runs/first
#
# torch's wheels bring the CUDA libraries with them, so one base image serves both; the host needs the NVIDIA driver and container toolkit.
ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim

# make and git for the targets; a C compiler, with which Triton builds its launchers on a GPU.
RUN apt-get update && apt-get install -y --no-install-recommends make git gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# Not root: model-written programs run in a sandbox of the user's own rights.
RUN useradd --create-home tether && mkdir /tether && chown tether /tether
USER tether
WORKDIR /tether

ARG TORCH_INDEX=
ENV TETHER_TORCH_INDEX=${TORCH_INDEX}
# The dependencies are a layer of their own: a change of the code does not install them again.
COPY --chown=tether pyproject.toml constraints.txt Makefile README.md LICENSE ./
COPY --chown=tether scripts scripts
COPY --chown=tether src/tether/core/version.py src/tether/core/version.py
RUN make set-up-dev
COPY --chown=tether . .
RUN make set-up-dev
CMD ["make", "help"]
