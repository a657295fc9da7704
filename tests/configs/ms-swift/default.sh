swift rlhf \
    --rlhf_type grpo \
    --model my-model
