"""Ten tasks of MiniGrid (Chevalier-Boisvert et al., 2023), one file each."""
