"""Text for schedulers: one recipe, run at set times by cron, systemd, Kubernetes, Airflow, GitHub Actions or
SkyPilot. One target a file; nothing here starts, installs or talks to anything.
"""
