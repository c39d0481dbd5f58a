"""Mixtures of experts: routers, experts and their load-balancing loss."""
