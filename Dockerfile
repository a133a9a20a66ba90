# CPU:   docker build -t thalweg .
#        docker run --rm -p 30000:30000 thalweg
# CUDA:  docker build -t thalweg:cuda --build-arg VARIANT=cuda .
#        docker run --rm --gpus all --shm-size 8g -p 30000:30000 -v models:/models thalweg:cuda serve org/name --host 0.0.0.0
ARG VARIANT=cpu
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

# PyTorch's own index has the CPU build. pip prefers it: +cpu is the higher of two equal versions.
FROM base AS torch-cpu
ARG TORCH=2.13.0
RUN pip install "torch==${TORCH}" --extra-index-url https://download.pytorch.org/whl/cpu

# PyPI's build contains the CUDA libraries; the host provides the driver. Triton needs gcc at run time.
FROM base AS torch-cuda
ARG TORCH=2.13.0
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install "torch==${TORCH}"

FROM torch-${VARIANT}
WORKDIR /opt/thalweg
COPY LICENSE README.md pyproject.toml ./
COPY models ./models
COPY thalweg ./thalweg
RUN pip install ".[otel]"
RUN useradd --uid 10001 --create-home thalweg && mkdir /models && chown thalweg /models
ENV HF_HOME=/models
VOLUME /models
USER 10001
EXPOSE 30000
# /health answers 503 until the model is loaded: the start period covers a download.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["thalweg"]
CMD ["serve", "models/tiny", "--host", "0.0.0.0"]
