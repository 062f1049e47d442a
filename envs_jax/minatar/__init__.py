"""The five games of MinAtar (Young and Tian, 2019), one file each."""
