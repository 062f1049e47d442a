"""Making an update: reductions over devices, gradients, optimisers, and what is learnt from when."""
