"""PEFT's LoRA layers."""
