GRPO_ARGS=(
   --advantage-estimator grpo
   --kl-coef 0.01
   --entropy-coef 0.00
   --eps-clip 0.2
)
python train.py ${GRPO_ARGS[@]}
