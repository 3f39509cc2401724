trl dpo --model_name_or_path org/base-1b --dataset_name org/pairs --beta 0.2 \
    --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0 --max_length 2048 \
    --use_peft --lora_r 8 --lora_dropout 0.1 --max_prompt_length 512 --output_dir out
