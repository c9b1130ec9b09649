# Two images of one code, in neither of which anything runs as root: `gateway` (the default: the gateway, the shipped
# conductor, the simulated workers) and `trainer` (the same with torch, for `baton worker` and `baton train`).
# The tag fixes the Python line. To fix the bytes as well, build with the digest your registry shows for it:
#   docker build --build-arg PYTHON_IMAGE=python:3.12-slim-bookworm@sha256:… .
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
RUN python -m venv --without-pip /opt/baton
COPY requirements/litellm.lock requirements/
RUN pip --python /opt/baton/bin/python install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
    -r requirements/litellm.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY policy policy
COPY migrations migrations
RUN pip --python /opt/baton/bin/python install --no-cache-dir --no-deps --no-build-isolation --no-index . \
    && pip --python /opt/baton/bin/python uninstall --yes setuptools

# torch is the one package without a hash here: scripts/lock says why. Its public wheel brings CUDA's libraries.
FROM build AS build-trainer
ARG TORCH=torch==2.13.0
COPY requirements/trl.lock requirements/
RUN pip --python /opt/baton/bin/python install --no-cache-dir --no-deps --only-binary :all: --require-hashes \
    -r requirements/trl.lock \
    && pip --python /opt/baton/bin/python install --no-cache-dir --only-binary :all: "${TORCH}"

FROM ${PYTHON_IMAGE} AS runtime
RUN pip uninstall --yes pip \
    && useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin baton \
    && install --directory --owner=baton --mode=0700 /data /policies
USER baton
WORKDIR /data
VOLUME /data
ENV BATON_DATA_DIR=/data PYTHONUNBUFFERED=1
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/baton/bin/baton"]

FROM runtime AS trainer
COPY --from=build-trainer /opt/baton /opt/baton
CMD ["worker"]

FROM runtime AS gateway
COPY --from=build /opt/baton /opt/baton
ENV BATON_HOST=0.0.0.0 BATON_ADMIN_HOST=0.0.0.0 BATON_PORT_STRICT=true BATON_SHOW_KEYS=false
EXPOSE 8080 8081
# Whether it lives, not whether it is ready: an outage of Redis is no reason to restart it.
HEALTHCHECK --start-period=60s --interval=10s --timeout=3s \
    CMD ["/opt/baton/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8081/livez', timeout=2)"]
CMD ["serve"]
