python3 train.py \
   --advantage-estimator grpo \
   --kl-coef 0.01
