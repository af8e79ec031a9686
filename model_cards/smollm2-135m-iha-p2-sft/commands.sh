# In the root of a checkout, after `make .venv/test-installed`.
export OMP_NUM_THREADS=1
python -m research.experiments.warm_start --variants mha iha_2 --seeds 1
