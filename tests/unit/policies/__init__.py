"""Tests of policies: manifests, versions, jobs and grading."""
