# docker build -t podracer .                                    on CPU
# docker build -t podracer --build-arg ACCELERATOR=cuda12 .     or cuda13, or tpu
# mkdir -p runs && docker run --rm --user "$(id -u):$(id -g)" \
#     -v "$PWD/runs:/home/podracer/runs" podracer train ppo cartpole
FROM python:3.12-slim

ARG ACCELERATOR=cpu
# Process 1 ignores signals that it has no handler for, and must wait for orphans: tini is that process.
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
# A new volume at /runs belongs to the user. Any other user, of `--user`, can write at home too.
RUN useradd --create-home --uid 1000 podracer \
    && install -d -o podracer -g podracer /runs \
    && chmod 1777 /home/podracer
COPY . /source
RUN case "$ACCELERATOR" in \
      cpu) extras=sebulba,gym,games,remote ;; \
      cuda12 | cuda13 | tpu) extras="sebulba,gym,games,remote,$ACCELERATOR" ;; \
      *) echo "ACCELERATOR=$ACCELERATOR: use cpu, cuda12, cuda13 or tpu" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir "/source[$extras]" \
    && rm -rf /source

ENV HOME=/home/podracer
USER 1000:1000
WORKDIR /home/podracer
ENTRYPOINT ["tini", "--", "podracer"]
CMD ["--help"]
