{{- define "baton.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "baton.labels" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "baton.selector" -}}
app.kubernetes.io/name: baton
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "baton.image" -}}
{{ .repository }}:{{ .tag | default .default }}
{{- end -}}

{{- define "baton.secret" -}}
{{ .Values.secrets.existing | default (include "baton.name" .) }}
{{- end -}}

{{- /* Of every pod with our image: no root, no capability, no writable root. */ -}}
{{- define "baton.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "baton.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "baton.env" -}}
- {name: BATON_DATA_DIR, value: /data}
- {name: BATON_PEPPER, value: "env:PEPPER"}
{{- if .Values.policies.claim }}
- {name: BATON_POLICIES_DIR, value: /policies}
{{- end }}
{{- if .Values.vllm.enabled }}
- {name: BATON_CONDUCTOR, value: {{ printf "http://%s-vllm:8000/v1#%s" (include "baton.name" .) .Values.vllm.model | quote }}}
- {name: BATON_POLICY_ENGINE, value: vllm-lora}
- {name: BATON_POLICY_RANK_MAX, value: {{ .Values.vllm.rankMax | quote }}}
- {name: BATON_POLICY_VERSIONS_MAX, value: {{ .Values.vllm.versionsMax | quote }}}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: {{ $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- end -}}
