"""Packs weights as the kernel reads them, once, and notices when they change."""
