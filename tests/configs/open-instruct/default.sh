python open_instruct/grpo_fast.py \
    --model_name_or_path my-model
