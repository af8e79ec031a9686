# In the root of a checkout, after `make .venv/test-installed`.
export OMP_NUM_THREADS=1
STORY="$(python -c "import importlib.util as u; print(u.find_spec('reasoning_gym').submodule_search_locations[0])")/data/in_the_year_2889.txt"
python -m research.checkpoints.untrained knocking_heads outputs/checkpoints/tiny-knocking-heads/untrained
python -m sft.train --config model_cards/tiny.yaml --model_name_or_path outputs/checkpoints/tiny-knocking-heads/untrained --dataset_name "$STORY" --output_dir outputs/checkpoints/tiny-knocking-heads/run
python -m evaluation.run outputs/checkpoints/tiny-knocking-heads/run/final --suite ruler --tasks perplexity_by_position --lengths 256 --limit 8 --data evaluation/smoke_data --output outputs/checkpoints/tiny-knocking-heads/evaluation
python -m model_cards.render outputs/checkpoints/tiny-knocking-heads/run/final --name tiny-knocking-heads --results outputs/checkpoints/tiny-knocking-heads/evaluation
