# The image of a job on Kubernetes, or under Slurm with containers:
#     docker build -t elastic-platform:0.1.0 .                              for GPUs; it runs without them too
#     docker build -t elastic-platform:0.1.0 --build-arg DEVICE=cpu .       for CPUs alone: a tenth of the size
ARG DEVICE=cuda

FROM python:3.11-slim-bookworm AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# wget: KubeRay's probes; procps: Ray's ps; a compiler: torch.compile; the user has the id that the jobs run as
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ gcc procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home trainer
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/elastic-platform
COPY requirements.txt .

FROM base AS torch-cuda
RUN pip install --no-cache-dir "$(grep ^torch== requirements.txt)"

FROM base AS torch-cpu
# PyTorch's own index, which has builds without CUDA
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep ^torch== requirements.txt)"

# hadolint ignore=DL3006
FROM torch-${DEVICE}
# The versions that the tests ran with, without the tools of development; Ray with its dashboard, by which KubeRay
# submits jobs, asks for their state and scrapes metrics.
RUN sed -e '/^# For development/,$d' -e 's/^ray==/ray[default]==/' requirements.txt > installed.txt \
    && pip install --no-cache-dir --requirement installed.txt
COPY . /opt/elastic-platform/source
RUN pip install --no-cache-dir --no-deps ./source && rm -rf source
USER 1000
WORKDIR /home/trainer
