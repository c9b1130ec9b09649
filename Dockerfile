# One image for the gateway, the shipped conductor and the simulated workers; nothing in it runs as root.
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

FROM ${PYTHON_IMAGE}
RUN pip uninstall --yes pip \
    && useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin baton \
    && install --directory --owner=baton --mode=0700 /data
COPY --from=build /opt/baton /opt/baton
USER baton
WORKDIR /data
VOLUME /data
ENV BATON_DATA_DIR=/data BATON_HOST=0.0.0.0 BATON_ADMIN_HOST=0.0.0.0 BATON_PORT_STRICT=true PYTHONUNBUFFERED=1
EXPOSE 8080 8081
HEALTHCHECK --start-period=60s --interval=10s --timeout=3s \
    CMD ["/opt/baton/bin/python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8081/readyz', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/baton/bin/baton"]
CMD ["serve"]
