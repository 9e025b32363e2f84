#!/bin/bash
# Trains on every host of a Cloud TPU slice:  ZONE=us-east5-a bash cloud_tpu.sh my-tpu steps=1000
# maxghost is in ~/maxghost of each host, and /nfs/shared is mounted on all. The same command continues the run.
set -euo pipefail
tpu=${1:?name of the TPU VM}
shift
printf -v keys ' %q' run_name=tpu base_output_directory=/nfs/shared/runs "$@"
gcloud compute tpus tpu-vm ssh "$tpu" --zone="${ZONE:?zone of the TPU VM}" --worker=all \
  --command="cd maxghost && python -m maxghost.train configs/base.yml$keys"
