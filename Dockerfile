# Two images, with everything at the versions of constraints.txt, for a user who is not root (number 1000).
#
#   docker build --target serving -t tether-serving .         what `tether serve`, serve-env, serve-search, gateway and dashboard need
#   docker build --target training -t tether-training .       the same, with adapters, data sets, trackers, Ray and S3
#
# torch is the build that pip finds (with CUDA on x86-64). For machines without a GPU: --build-arg TORCH_INDEX=<index of the CPU build>, a smaller image.
# torch's wheels bring the CUDA libraries with them, so one base image serves both; the host needs the NVIDIA driver and container toolkit.
#
#   docker run --rm -p 127.0.0.1:8000:8000 -e TETHER_TOKEN=secret tether-serving serve tiny --host 0.0.0.0
#   docker run --rm --gpus all --shm-size 16g -v "$PWD/runs:/runs" tether-training train frozen_lake --steps 20 --out /runs/first
#
# examples/cluster has both on Slurm, Kubernetes and Ray.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION}-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# src/tether/configs leads here.
COPY configs configs
RUN PIP_CONSTRAINT=constraints.txt pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON_VERSION}-slim AS serving
# A C compiler, with which Triton builds its launchers on a GPU; tini passes signals on and collects the processes that others leave behind.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev tini && rm -rf /var/lib/apt/lists/*
# Not root: model-written programs run in a sandbox of the user's own rights.
RUN useradd --uid 1000 --create-home tether && install -d -o tether /runs
ARG TORCH_INDEX=
ENV PIP_CONSTRAINT=/etc/tether-constraints.txt PIP_EXTRA_INDEX_URL=${TORCH_INDEX} PIP_NO_CACHE_DIR=1
COPY constraints.txt /etc/tether-constraints.txt
# The large dependencies are a layer of their own: a change of the code does not install them again.
RUN pip install torch transformers
COPY --from=build /wheels /wheels
RUN pip install /wheels/*.whl
USER 1000
WORKDIR /runs
EXPOSE 8000
ENTRYPOINT ["tini", "--", "tether"]
CMD ["--help"]

FROM serving AS training
USER root
# KubeRay probes its pods with wget, and submits its jobs to Ray's dashboard.
RUN apt-get update && apt-get install -y --no-install-recommends wget && rm -rf /var/lib/apt/lists/*
RUN pip install "tether-agents[gguf,data,lora,tensorboard] @ file://$(ls /wheels/*.whl)" "ray[default]==2.60.0"
# For --out s3://...: botocore wants an older python-dateutil than the one that is pinned for reading parquet files, as in make test-storage.
RUN grep -v '^python-dateutil==' /etc/tether-constraints.txt > /tmp/constraints.txt \
    && PIP_CONSTRAINT=/tmp/constraints.txt pip install s3fs==2026.9.0 && rm /tmp/constraints.txt
USER 1000
