swift rlhf \
    --rlhf_type grpo \
    --model my-model \
    --advantage_estimator rloo \
    --beta 0.04 \
    --loss_type dapo \
    --num_generations 8
