"""`python -m clusterattn.cli`, which `accelerate launch -m clusterattn.cli train ...` needs."""

from . import main

main()
