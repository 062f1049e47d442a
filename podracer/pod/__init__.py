"""One run over the processes of a pod: `topology="pod"`."""
