# docker build -t podracer .                                    on CPU
# docker build -t podracer --build-arg ACCELERATOR=cuda12 .     or cuda13, or tpu
# docker run --rm -v "$PWD/runs:/home/podracer/runs" podracer train ppo cartpole
FROM python:3.12-slim

ARG ACCELERATOR=cpu
RUN useradd --create-home podracer
COPY . /source
RUN case "$ACCELERATOR" in \
      cpu) extras=sebulba,gym,games,remote ;; \
      cuda12 | cuda13 | tpu) extras="sebulba,gym,games,remote,$ACCELERATOR" ;; \
      *) echo "ACCELERATOR=$ACCELERATOR: use cpu, cuda12, cuda13 or tpu" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir "/source[$extras]" \
    && rm -rf /source

USER podracer
WORKDIR /home/podracer
ENTRYPOINT ["podracer"]
CMD ["--help"]
