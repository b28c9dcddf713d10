# An image with the command `samebits`, which does not run as root:
#
#   docker build -t samebits .
#   mkdir -p runs && cp reviews.csv runs/
#   docker run --rm --gpus all --ipc=host -v "$PWD/runs:/work/runs" samebits train --csv runs/reviews.csv
#
# On a machine without GPUs, leave out --gpus. For CUDA, the wheel of PyTorch on PyPI contains all libraries it needs.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY app app
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
COPY constraints.txt /tmp/
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl && rm /tmp/constraints.txt
# Files that a run writes into a mounted folder belong to this user on the host, too: `docker build --build-arg USER_ID=…`.
ARG USER_ID=1000
RUN useradd --uid "${USER_ID}" --create-home samebits && mkdir -p /work/runs && chown -R samebits /work
USER samebits
WORKDIR /work
# The samebits process is number 1 of the container. It passes SIGTERM on to its ranks, which save a checkpoint.
ENTRYPOINT ["samebits"]
CMD ["--help"]
